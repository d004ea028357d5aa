"""Serves MLflow's own pages over a home, or optuna-dashboard's, for `hpo ui`, on loopback, behind a token.

Measured with MLflow 3.17 on two cores: one uvicorn worker without job execution takes half a gigabyte and answers after
about ten seconds; `mlflow server` by default takes sixteen processes, 2.3 GB and 43 s.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from hpo.child_process import spawn
from hpo.door import option
from hpo.errors import HpoError, StorageError, UserError
from hpo.ledger.database.sqlite_url import path_of
from hpo.ledger.rows import StudyRow
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.tracking.mlflow.damage import damage_of
from hpo.tracking.pages import study_page
from hpo.tracking.ui.gate import PARAMETER, opening_page, token_of
from hpo.tracking.uri import check_uri, of_rows, tracker_name

START_SECONDS = 120.0
DASHBOARD = "optuna-dashboard"
_DASHBOARD = "hpo.analysis.plots.dashboard"  # by name: the analysis is a higher layer

# No page can run code, unpickle or send telemetry.
_HARDENED = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def serve(
    home: Home,
    tracking_uri: str | None = None,
    port: int = 5000,
    host: str = "127.0.0.1",
    open_browser: bool = False,
    studies: Sequence[StudyRow] = (),
) -> int:
    """Serves until Ctrl-C and returns the exit code.

    Prints the pages of `studies` and opens the first. Raises HpoError, in one sentence, if the server cannot start.
    """
    uses_home = (home.root / "mlflow.db").exists() or not studies
    uri = tracking_uri or (home.tracking_uri if uses_home else of_rows(studies, home))
    if tracking_uri:
        check_uri(tracking_uri)
    if urlsplit(uri).scheme in ("http", "https"):
        shown = tracker_name(uri)
        page = study_page(shown, studies[0]) if studies else shown
        raise UserError(f"MLflow at {shown} is a server already: open {page} in a browser.")
    return _until_stopped(
        home,
        "MLflow",
        lambda: start(home, uri, port, host),
        lambda base: _show(home, base, studies, open_browser),
        port,
    )


def serve_optuna(
    home: Home, storage: str | None, study: str | None, port: int, host: str = "127.0.0.1", open_browser: bool = False
) -> int:
    """Serves optuna-dashboard over an export that is refreshed, until Ctrl-C, and returns the exit code."""

    def show(base: str) -> None:
        address = f"{base}/?{PARAMETER}={token_of(home)}"
        print(f"optuna-dashboard shows this home at {address} (Ctrl-C stops it)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(opening_page(home, address).as_uri())

    return _until_stopped(home, DASHBOARD, lambda: start_optuna(home, storage, study, port, host), show, port)


def start_optuna(
    home: Home, storage: str | None, study: str | None, port: int, host: str = "127.0.0.1"
) -> subprocess.Popen[bytes]:
    """Starts optuna-dashboard and returns without waiting; `halt` ends it."""
    if missing := [
        name for name in ("optuna_dashboard", "uvicorn", "a2wsgi") if importlib.util.find_spec(name) is None
    ]:
        raise UserError(f"optuna-dashboard's pages need {' and '.join(missing)}: pip install 'hpo[dashboard]'.")
    arguments = ["--study", study] if study else []
    return _spawn(home, _DASHBOARD, port, host, arguments, HPO_STORAGE=storage or home.storage)


def _until_stopped(
    home: Home,
    name: str,
    begin: Callable[[], subprocess.Popen[bytes]],
    show: Callable[[str], None],
    port: int,
    host: str = "127.0.0.1",
) -> int:
    """Runs the server that `begin` starts until a signal comes; calls `show` once it answers."""
    base = f"http://{host}:{port}"
    stopped: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server = begin()
        try:
            if _wait(name, server, host, port, home, stopped):
                show(base)
            while not stopped and server.poll() is None:
                time.sleep(0.1)
            if not stopped:
                raise HpoError(f"{name}'s server ended by itself: {_last_line(_log(home))} (see {_log(home)}).")
        finally:
            halt(server)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if stopped[0] == signal.SIGINT else 128 + stopped[0]


def _show(home: Home, base: str, studies: Sequence[StudyRow], open_browser: bool) -> None:
    """Prints the addresses of the pages, and opens the first."""
    token = token_of(home)
    address = f"{base}/?{PARAMETER}={token}"
    print(f"MLflow shows this home at {address} (Ctrl-C stops it)", flush=True)
    pages = {study.name: study_page(base, study, token) for study in studies}
    for name, page in pages.items():
        print(f"  trials of {name}, best first: {page}", flush=True)
    if open_browser:
        import webbrowser

        webbrowser.open(opening_page(home, next(iter(pages.values()), address)).as_uri())


def start(home: Home, uri: str, port: int, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
    """Starts MLflow's server over the database `uri` and returns without waiting; `halt` ends it.

    It dies with this process, however that ends, and its own children die with it.
    """
    if importlib.util.find_spec("flask") is None:
        raise UserError("MLflow's pages need the full mlflow package: pip install 'hpo[ui]'.")
    if uri.startswith("sqlite:///") and not (path_of(uri) or Path()).exists():
        raise UserError(f"there is nothing to show at {uri}: run a study first, or give the right {option('home')}.")
    check_uri(uri)
    if damaged := damage_of(uri):
        raise HpoError(damaged)
    return _spawn(home, "hpo.tracking.ui.gated_server", port, host, [], MLFLOW_BACKEND_STORE_URI=uri, **_HARDENED)


def _spawn(
    home: Home, module: str, port: int, host: str, more: Sequence[str], **environ: str
) -> subprocess.Popen[bytes]:
    if host not in ("127.0.0.1", "localhost", "::1"):
        raise UserError(
            f"host {host!r} is not loopback, and these pages are not encrypted: docker/ shows a team's server."
        )
    _check_free(host, port)
    arguments = [module, "--home", str(home.root), "--host", host, "--port", str(port), *more]
    try:
        token_of(home)
        return spawn("hpo.tracking.ui.supervise", arguments, _log(home), **environ)
    except OSError as error:
        raise StorageError(f"{_log(home)} cannot be written ({error.strerror}): make it writable.") from error


def halt(server: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """Ends the server and its worker."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(grace)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(host: str, port: int) -> bool:
    """Returns whether a server of these pages answers there."""
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _wait(name: str, server: subprocess.Popen[bytes], host: str, port: int, home: Home, stopped: list[int]) -> bool:
    """Returns True once the server answers, False if it is asked to stop first."""
    began, announced = time.monotonic(), False
    deadline = began + START_SECONDS
    while not stopped:
        if answers(host, port):
            return True
        if not announced and time.monotonic() > began + 1.0:
            announced = True
            print(f"{name}'s server is starting, which takes some seconds ...", file=sys.stderr, flush=True)
        if server.poll() is not None or time.monotonic() > deadline:
            raise HpoError(f"{name}'s server did not start: {_last_line(_log(home))} (see {_log(home)}).")
        time.sleep(0.2)
    return False


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} on {host} is taken ({error.strerror}): give another by {option('port')}."
            ) from error


def _log(home: Home) -> Path:
    return home.logs / "ui.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
