"""The entry point of MLflow's image: `serve`, or `migrate` its databases once before that.

What is secret comes from files (NAME_FILE), and the file that MLflow wants its users' database named in is written to
the temporary directory. Bad settings end it in one sentence.
"""

from __future__ import annotations

import configparser
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

DATABASES = ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_AUTH_DATABASE_URI")
SECRETS = (
    *DATABASES,
    "MLFLOW_AUTH_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
)
SETTINGS = (
    "MLFLOW_ARTIFACTS_DESTINATION",
    "MLFLOW_AUTH_ADMIN_USERNAME",
    "MLFLOW_SERVER_ALLOWED_HOSTS",
    "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS",
)
# Nothing that a page can trigger runs code or unpickles, nothing phones home.
HARDENED = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
PORT = 5000


def secrets(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The value of each name, out of the file that NAME_FILE names; SystemExit with a sentence if there is none."""
    return {name: _read(f"{name}_FILE", environ.get(f"{name}_FILE", "")) for name in names}


def _read(setting: str, path: str) -> str:
    if not path:
        sys.exit(f"mlflow: {setting} is not set: name the file that holds {setting.removesuffix('_FILE')}.")
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        sys.exit(f"mlflow: {setting}: {path} cannot be read ({error.strerror}): write the secret into that file.")
    return text or sys.exit(f"mlflow: {setting}: {path} is empty: write the secret into that file.")


def migrate(found: Mapping[str, str]) -> None:
    """Make both databases, or bring them to this version of MLflow."""
    import sqlalchemy
    from mlflow.server.auth.db.utils import migrate as migrate_users
    from mlflow.store.db import utils
    from sqlalchemy.exc import OperationalError

    def migrate_runs(store: sqlalchemy.Engine) -> None:
        (utils._initialize_tables if utils._is_empty_database(store) else utils._upgrade_db)(store)

    for setting, bring in zip(DATABASES, (migrate_runs, lambda users: migrate_users(users, "head")), strict=True):
        engine = sqlalchemy.create_engine(found[setting])
        try:
            bring(engine)
        except OperationalError as error:
            url, said = engine.url.render_as_string(hide_password=True), str(error.orig).splitlines()[0]
            sys.exit(f"mlflow: {url} does not answer ({said}): check that it runs, and {setting}_FILE.")


def serve(found: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Become MLflow's server, which asks for a password and answers only to the hosts it is told of."""
    if missing := [name for name in SETTINGS if not environ.get(name)]:
        sys.exit(f"mlflow: {missing[0]} is not set: docker/README.md says what it is for.")
    _check_free(PORT)
    users = configparser.ConfigParser(interpolation=None)
    users["mlflow"] = {
        "default_permission": "NO_PERMISSIONS",
        "database_uri": found["MLFLOW_AUTH_DATABASE_URI"],
        "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
        "auth_cache_ttl_seconds": "60",  # a password is hashed once a minute, not with each request
    }
    path = Path(os.environ.get("TMPDIR", "/tmp"), "basic_auth.ini")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        users.write(file)
    settings = {**environ, **HARDENED, **found, "MLFLOW_AUTH_CONFIG_PATH": str(path)}
    command = ["mlflow", "server", "--app-name", "basic-auth", "--host", "0.0.0.0", "--port", str(PORT)]
    os.execvpe("mlflow", [*command, "--workers", environ.get("MLFLOW_WORKERS", "2")], settings)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            sys.exit(f"mlflow: port {port} is taken ({error.strerror}): stop what listens there.")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["migrate"]:
            migrate(secrets(DATABASES, os.environ))
        case ["serve"]:
            serve(secrets(SECRETS, os.environ), os.environ)
        case other:
            sys.exit(f"mlflow: {' '.join(other) or 'nothing'}: give serve or migrate.")
