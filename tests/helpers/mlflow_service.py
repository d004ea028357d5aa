"""Starts an MLflow server with a SQLite store and artifacts of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certificates import Pair


@contextmanager
def serving(root: Path, empty: Path, pair: Pair | None = None, *, address: str = "127.0.0.1") -> Iterator[str]:
    """Yields the URI of a server at an address, or over TLS by localhost with the certificate `pair`.

    `empty` is a database of MLflow without runs, of which the server gets a copy. It answers by any host name.
    """
    shutil.copyfile(empty, root / "mlflow.db")
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", address, "--port", str(port), "-w", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(root / "artifacts"), "--allowed-hosts", "*"]
    if pair:
        command += ["--uvicorn-opts", f"--ssl-certfile {pair.certificate} --ssl-keyfile {pair.key}"]
    environ = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = root / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environ, cwd=root, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while "Application startup complete" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"https://localhost:{port}" if pair else f"http://{address}:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
