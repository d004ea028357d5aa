"""Removes secrets from URLs, and from texts that contain URLs, before they are shown or stored.

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

# URL parameters without secrets: libpq's, SQLAlchemy's and SQLite's. The values of all others are hidden.
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
    """Returns `text` with every URL in it redacted by `redacted_url`; a URL ends at the first space."""
    return _IN_TEXT.sub(lambda match: redacted_url(match[0]), text) if ":/" in text else text


def redacted_url(url: str) -> str:
    """Returns a URL with its password, and the values of parameters that may be secret, as `***`.

    If it cannot be parsed reliably, since a password has characters that should have been percent-encoded, it is hidden
    up to the last `@`. Applying it twice changes nothing more.
    """
    if (match := _OF_FILES.match(url)) is not None:
        path, mark, query = url[match.end() :].partition("?")
        return match[0] + redacted(path) + mark + _query(query)
    scheme = _SCHEME.match(url)[0]  # pyright: ignore[reportOptionalSubscript]  # it may be empty
    before, at, rest = url[len(scheme) :].rpartition("@")
    if "?" in before:
        return scheme + HIDDEN
    user, colon, _ = before.partition(":")
    if colon or (at and scheme.lower().startswith("http")):  # for a web server a user alone is a token
        user = f"{user}:{HIDDEN}" if colon else HIDDEN
    address, mark, query = rest.partition("?")
    address, fragment, anchor = address.partition("#")
    return scheme + user + at + _address(address) + (fragment and _fragment(anchor)) + mark + _query(query)


def unclear(url: str) -> bool:
    """Returns True if user and password cannot be delimited: they hold a space or an unencoded `@ / ? #`."""
    if _OF_FILES.match(url):
        return False
    scheme = _SCHEME.match(url)[0]  # pyright: ignore[reportOptionalSubscript]
    return re.search(r"\s", url) is not None or re.search(r"[@/?#].*@", url[len(scheme) :], re.DOTALL) is not None


ENCODE = "percent-encode each space and / : @ ? # % in its user, its password and its parameters, as %40 for @"


def _address(address: str) -> str:
    """Returns `host:port/path`; an invalid port is hidden, as it may be a password without an `@` after it."""
    authority, slash, path = address.partition("/")
    if (match := _PORT.fullmatch(authority)) is not None and match["more"]:
        authority = f"{match['host']}:{HIDDEN}"
    return authority + slash + path


def _fragment(told: str) -> str:
    """Returns the fragment; one that is a path, as in MLflow's pages, is shown."""
    return f"#{told}" if told.startswith("/") or not told else f"#{HIDDEN}"


def _query(query: str) -> str:
    return "&".join(map(_parameter, query.split("&")))


def _parameter(parameter: str) -> str:
    name, equals, value = parameter.partition("=")
    if not parameter or name in _PLAIN:
        return parameter
    match = _VALUE.fullmatch(value if equals else name)
    after = match["after"] if match else ""
    return f"{name}={HIDDEN}{after}" if equals else f"{HIDDEN}{after}"


class _Stream(io.TextIOWrapper):
    """A stream whose texts are redacted."""

    def write(self, text: str, /) -> int:
        return super().write(redacted(text))


def install(*, streams: bool = False) -> None:
    """Redacts the traceback of an unexpected error in this process; with `streams`, all that it prints.

    Libraries' output is included.
    """
    if streams:
        sys.stdout, sys.stderr = (
            _Stream(stream.buffer, encoding="utf-8", errors="replace", line_buffering=True)
            for stream in (sys.stdout, sys.stderr)
        )

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(visible(redacted("".join(traceback.format_exception(kind, error, trace)))))

    sys.excepthook = show
