"""Parses the URL of a ledger, and adds the password that libpq reads from the environment."""

from __future__ import annotations

import os

import sqlalchemy as sa
from sqlalchemy import exc

from hpo.door import option
from hpo.errors import UserError
from trainer.redaction import redacted_url, unclear


def parsed(url: str) -> sa.URL:
    """Returns the parts of the URL. Raises UserError."""
    try:
        return sa.make_url(url)
    except (exc.ArgumentError, ValueError) as error:  # ValueError for a port that is not a number
        shown = option("storage", repr(redacted_url(url)))
        raise UserError(f"{shown} is not a database URL: use sqlite:///PATH or postgresql+psycopg://...") from error


def with_password(url: str) -> str:
    """Returns the URL with the password of PGPASSWORD, if it names a PostgreSQL server and has no password."""
    password = os.environ.get("PGPASSWORD")
    if not password or unclear(url):
        return url
    parts = parsed(url)
    if parts.get_backend_name() != "postgresql" or parts.password or "password" in parts.query:
        return url
    return parts.update_query_dict({"password": password}).render_as_string(hide_password=False)
