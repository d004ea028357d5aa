"""Starts an MLflow server with a store and artifacts of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(root: Path, empty: Path, address: str = "127.0.0.1") -> Iterator[str]:
    """Yields the URI of a server that keeps all below `root`, and begins with the initialised database `empty`.

    It answers by whatever name a client knows it.
    """
    shutil.copyfile(empty, root / "mlflow.db")
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    uri = f"http://{address}:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", address, "--port", str(port), "-w", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(root / "artifacts"), "--allowed-hosts", "*"]
    environ = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=root, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (root / "log").read_text()
            try:
                with urllib.request.urlopen(f"{uri}/health", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
