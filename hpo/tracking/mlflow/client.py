"""Opens MLflow's client, and reports why a server does not answer."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hpo.ledger.database.faults import DATABASE_ERRORS
from hpo.text import command
from hpo.tracking.mlflow.store import locked
from hpo.tracking.uri import tracker_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Read by MLflow at each call. An unanswered POST must not be repeated unnoticed, nor may a dead server hold the mirror
# for minutes.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def silence(uri: str, seconds: float = 1.0) -> str:
    """Returns a notice about a server that does not answer now; "" if it does, or if `uri` is a database."""
    reason = away(uri, seconds)
    more = "training goes on, and it is sent everything once it is back, by this run, the next, or"
    return f"{reason}: {more} `{command('sync')}`." if reason else ""


def away(uri: str, seconds: float = 1.0) -> str:
    """Returns a sentence about why a server does not answer now; "" if it does, or if `uri` is a database."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), seconds).close()
        return ""
    except OSError as error:
        return f"MLflow at {tracker_name(uri)} does not answer now ({error.strerror or error})"


def opened(uri: str, artifacts: Path, *, made: bool) -> MlflowClient:
    from mlflow import MlflowClient

    if not made:
        return MlflowClient(uri)
    with locked(artifacts.parent / "mlflow.lock"):  # the first process to open another database makes its tables
        return MlflowClient(uri)


def outages() -> tuple[type[Exception], ...]:
    """Returns the errors that MLflow, its database, the network and the disk raise."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    return (MlflowException, RequestException, *DATABASE_ERRORS, OSError)


def user() -> str:
    """Returns the user's name, or the uid if it has none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return str(os.getuid())
