"""Converts between paths, with any characters in them, and URLs of SQLite's files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import sqlalchemy
from sqlalchemy.engine import make_url

from hpo.errors import UserError

# The options that SQLAlchemy's pysqlite reads from a query itself; with `uri` the rest goes to SQLite.
_KNOWN = {"uri", "timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements"}


def url_of(path: Path) -> str:
    """Returns an absolute URL for `path`. It is quoted, since SQLAlchemy ends a path at `?` and, from 2.1 on, unquotes
    `%41`.

    The driver is named if characters are quoted, since MLflow creates a directory from the text after `sqlite:///`.
    """
    plain, quoted = f"sqlite:///{path}", str(path).replace("%", "%25").replace("?", "%3F")
    for url in (plain, f"sqlite+pysqlite:///{quoted}"):
        if make_url(url).database == str(path):
            return url
    raise UserError(f"{path} has a '?', which SQLAlchemy {sqlalchemy.__version__} takes in no path: choose another.")


def path_of(url: str) -> Path | None:
    """Returns the file that `url` names, None if it names none.

    Raises UserError if something other than an option follows a `?`.
    """
    parsed = make_url(url)
    name = parsed.database or ""
    if parsed.query.get("uri") == "true" and name.startswith("file:"):
        return Path(unquote(name.removeprefix("file:")))
    for option in filter(None, url.partition("?")[2].split("&")):
        if option.partition("=")[0] not in _KNOWN:
            raise UserError(
                f"{url!r} ends its path at the '?', and {option!r} is not an option of SQLite: write %3F for a '?' in "
                "a path."
            )
    return None if name in ("", ":memory:") else Path(name)
