"""Takes what is secret out of URLs, and out of texts that hold URLs, before people or files get them.

The errors of `hpo` and `trainer` pass through here when they are made, so a message may quote any URL, and any library.
"""

from __future__ import annotations

import io
import re
import sys
import traceback
from types import TracebackType

from trainer.quote import visible

HIDDEN = "***"

# Parameters of URLs that hold no secret: libpq's, SQLAlchemy's and SQLite's. The values of all others are hidden.
_PLAIN = (
    *("host", "hostaddr", "port", "dbname", "user", "driver", "charset", "timeout", "connect_timeout", "keepalives"),
    *("application_name", "options", "target_session_attrs", "gssencmode"),
    *("sslmode", "sslcert", "sslkey", "sslcrl", "sslrootcert"),
    *("mode", "uri", "immutable", "check_same_thread"),
)
_IN_TEXT = re.compile(r"[A-Za-z0-9_+.-]{1,32}:/+\S*")
_SCHEME = re.compile(r"[A-Za-z0-9_+.-]+:/+|/*")
_OF_FILES = re.compile(r"(sqlite|file)[\w+.-]*:///+", re.IGNORECASE)
_PORT = re.compile(r"(?P<host>\[[^]]*\]|[^:]*):(?P<port>[0-9]{0,5}[^\w%]*)?(?P<more>.*)", re.DOTALL)
_VALUE = re.compile(r"(?P<value>.*?)(?P<after>[\"')\],.;:]*)", re.DOTALL)


def redacted(text: str) -> str:
    """`text` with every URL in it as `redacted_url` gives it; a URL ends at the first space."""
    return _IN_TEXT.sub(lambda found: redacted_url(found[0]), text) if ":/" in text else text


def redacted_url(url: str) -> str:
    """A URL with its password, and the values of parameters that may be secret, as `***`.

    What cannot be taken apart for certain, since a password holds characters that should have been percent-encoded, is
    hidden to the last `@`. Applied again it changes nothing.
    """
    if (found := _OF_FILES.match(url)) is not None:
        path, mark, query = url[found.end() :].partition("?")
        return found[0] + redacted(path) + mark + _query(query)
    scheme = _SCHEME.match(url)[0]  # pyright: ignore[reportOptionalSubscript]  # it may be empty
    before, at, rest = url[len(scheme) :].rpartition("@")
    if "?" in before:
        return scheme + HIDDEN
    user, colon, _ = before.partition(":")
    if colon or (at and scheme.lower().startswith("http")):  # of a web server a user alone is a token
        user = f"{user}:{HIDDEN}" if colon else HIDDEN
    place, mark, query = rest.partition("?")
    place, fragment, told = place.partition("#")
    return scheme + user + at + _place(place) + (fragment and _fragment(told)) + mark + _query(query)


def unclear(url: str) -> bool:
    """Whether it cannot be told where user and password end: they hold a space or an `@ / ? #` that is not encoded."""
    if _OF_FILES.match(url):
        return False
    scheme = _SCHEME.match(url)[0]  # pyright: ignore[reportOptionalSubscript]
    return re.search(r"\s", url) is not None or re.search(r"[@/?#].*@", url[len(scheme) :], re.DOTALL) is not None


ENCODE = "percent-encode each space and / : @ ? # % in its user, its password and its parameters, as %40 for @"


def _place(place: str) -> str:
    """`host:port/path`; what stands for a port and is none may be a password that no `@` follows."""
    authority, slash, path = place.partition("/")
    if (found := _PORT.fullmatch(authority)) is not None and found["more"]:
        authority = f"{found['host']}:{HIDDEN}"
    return authority + slash + path


def _fragment(told: str) -> str:
    """A fragment that is a path, as of MLflow's pages, is shown."""
    return f"#{told}" if told.startswith("/") or not told else f"#{HIDDEN}"


def _query(query: str) -> str:
    return "&".join(map(_parameter, query.split("&")))


def _parameter(parameter: str) -> str:
    name, equals, value = parameter.partition("=")
    if not parameter or name in _PLAIN:
        return parameter
    found = _VALUE.fullmatch(value if equals else name)
    after = found["after"] if found else ""
    return f"{name}={HIDDEN}{after}" if equals else f"{HIDDEN}{after}"


class _Stream(io.TextIOWrapper):
    """A stream whose texts pass through here."""

    def write(self, text: str, /) -> int:
        return super().write(redacted(text))


def install(*, streams: bool = False) -> None:
    """Have the traceback of an error that nobody expected pass through here too, in this process; with `streams` all
    that it prints, libraries included."""
    if streams:
        sys.stdout, sys.stderr = (
            _Stream(stream.buffer, encoding="utf-8", errors="replace", line_buffering=True)
            for stream in (sys.stdout, sys.stderr)
        )

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(visible(redacted("".join(traceback.format_exception(kind, error, trace)))))

    sys.excepthook = show
