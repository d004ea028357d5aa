"""Chooses the address of a study's tracker, and checks it."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.sqlite_url import path_of
from hpo.ledger.rows import StudyRow
from hpo.storage.home import Home
from trainer.redaction import ENCODE, redacted_url, unclear

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def tracking_uri_of(ledger: Ledger, name: str, home: Home, given: str | None) -> str:
    """Returns the tracking URI of a study: `given`, else the one that the study began with, else the home's."""
    with ledger.read() as connection:
        begun = queries.study_row(connection, name)
    if given:
        check_uri(given)
    return given or of_rows([begun], home)


def of_rows(studies: Sequence[StudyRow], home: Home) -> str:
    """Returns the tracking URI that all of `studies` began with, if they share one; else the home's."""
    begun = [study.environment for study in studies]
    # A home that was moved uses its own MLflow store.
    uris = {
        home.tracking_uri
        if study["tracking_uri"] == tracker_name(Home(Path(study["home"])).tracking_uri)
        else study["tracking_uri"]
        for study in begun
    }
    return uris.pop() if len(uris) == 1 else home.tracking_uri


def tracker_name(uri: str) -> str:
    """Returns `uri` without user and password, cut to the length that the ledger's cursors hold."""
    parts = urlsplit(uri)
    name = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl() if parts.netloc else uri
    return name if len(name) <= 250 else f"{name[:200]}#{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def check_uri(uri: str) -> str:
    """Returns the URI's scheme without a driver; raises UserError unless the URI can be used. Connects to nothing."""
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018  # which is parsed, and may be no number, when it is asked for
    except ValueError as error:
        raise UserError(
            f"{option('tracking_uri', repr(redacted_url(uri)))} is not a URI: give sqlite:///PATH or http(s)://HOST:PORT."
        ) from error
    scheme = parts.scheme.partition("+")[0]
    wrong, fix = "", "give sqlite:///PATH, another database or http(s)://HOST"
    if scheme not in (*DATABASES, "http", "https"):
        wrong = "it has no scheme" if not scheme else f"the scheme {scheme!r} is not known"
    elif scheme == "sqlite":
        path = path_of(uri) if ":///" in uri else None
        if path is None or not path.name:
            wrong, fix = "it names no file", "give sqlite:///PATH"
        elif not path.parent.is_dir():
            wrong, fix = f"the directory {path.parent} does not exist", "make it, or name another"
        elif path.is_dir():
            wrong, fix = f"{path} is a directory", "name a file in it"
    elif unclear(uri):
        wrong, fix = "it cannot be taken apart", ENCODE
    elif scheme in ("http", "https") and (parts.query or parts.fragment):
        wrong, fix = (
            "a server takes no parameters",
            "leave out what follows ? or #; MLFLOW_TRACKING_TOKEN holds a token",
        )
    elif scheme in ("http", "https") and not parts.hostname:  # a database may be reached by a socket
        wrong, fix = "it names no host", f"give {scheme}://HOST"
    if wrong:
        raise UserError(f"{option('tracking_uri', repr(redacted_url(uri)))} cannot be used, {wrong}: {fix}.")
    return scheme


def loopback(uri: str) -> bool:
    """Returns whether a server's URI names this host."""
    host = urlsplit(uri).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
