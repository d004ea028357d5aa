"""Opens MLflow's client, and reports why a server does not answer or does not verify."""

from __future__ import annotations

import getpass
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hpo.door import option
from hpo.errors import UserError
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
CERTIFICATES = "MLFLOW_TRACKING_SERVER_CERT_PATH"


def set_up() -> None:
    """Sets what this process needs of MLflow's client, where the user has set nothing."""
    os.environ.update({key: value for key, value in SETTINGS.items() if key not in os.environ})
    if not os.environ.get(CERTIFICATES):
        os.environ.pop(CERTIFICATES, None)  # if it is set and empty, MLflow verifies nothing


def silence(uri: str, seconds: float = 1.0) -> str:
    """Returns a notice about a server that cannot be used now; "" if it can, or if `uri` is a database."""
    more = "by this run, the next, or"
    if reason := _unanswered(uri, seconds):
        return f"{reason}: training goes on, and it is sent everything once it is back, {more} `{command('sync')}`."
    if reason := untrusted(uri, seconds):
        return f"{reason}; training goes on, and it is sent everything once that is right, {more} `{command('sync')}`."
    return ""


def away(uri: str, seconds: float = 1.0) -> str:
    """Returns a sentence about why a server cannot be used now; "" if it can, or if `uri` is a database."""
    return _unanswered(uri, seconds) or untrusted(uri, seconds)


def check_trust(uri: str) -> None:
    """Raises UserError if a server's certificate does not verify. A server that does not answer raises nothing."""
    if reason := untrusted(uri):
        raise UserError(f"{reason}.")


def untrusted(uri: str, seconds: float = 5.0) -> str:
    """Returns a sentence about why a server's certificate does not verify as MLflow's client verifies it.

    Returns "" if it does, if the server does not speak TLS or does not answer, and if the user has turned verification
    off.
    """
    file = os.environ.get(CERTIFICATES)
    insecure = not file and os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    if urlsplit(uri).scheme != "https" or insecure:
        return ""
    import requests

    why = ""
    try:
        requests.head(uri, verify=file or True, timeout=seconds, allow_redirects=False)
    except requests.exceptions.SSLError as error:
        why = _distrust(error)
    except requests.RequestException:
        pass
    except OSError as error:  # it looks for the file before it connects
        why = str(error)
    return f"MLflow at {tracker_name(uri)} cannot be trusted ({why}): {_trust()}" if why else ""


def _trust() -> str:
    return (
        f"name the file of the authority that has signed its certificate in {CERTIFICATES}, and its host in "
        f"{option('tracking_uri')} as the certificate does"
    )


def _distrust(error: BaseException) -> str:
    """Returns why TLS refuses a certificate or the file that should verify it; "" if the handshake broke off."""
    error = _innermost(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}".rstrip(".")
    file = os.environ.get(CERTIFICATES)
    if isinstance(error, PermissionError):
        return f"{file}: {error.strerror}"
    return f"{file} holds no certificate" if "[X509" in str(error) else ""


def _innermost(error: BaseException) -> BaseException:
    """Returns the error of OpenSSL in those of urllib3 and requests, which hold it as their reason or argument."""
    parts: tuple[object, ...] = (getattr(error, "reason", None), *error.args)
    within = next((part for part in parts if isinstance(part, BaseException)), None)
    return error if within is None else _innermost(within)


def _unanswered(uri: str, seconds: float) -> str:
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
