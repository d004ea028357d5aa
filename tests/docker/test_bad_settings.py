"""What is wrong with a service's settings ends it in one sentence that names the service, the setting and the fix."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from compose_file import DOCKER

SECRETS = (
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_AUTH_DATABASE_URI",
    "MLFLOW_AUTH_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
)
SETTINGS = {
    "MLFLOW_ARTIFACTS_DESTINATION": "s3://mlflow",
    "MLFLOW_AUTH_ADMIN_USERNAME": "hpo",
    "MLFLOW_SERVER_ALLOWED_HOSTS": "localhost:*",
    "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": "http://localhost:5000",
}


@pytest.fixture
def said(process):
    """Runs a script of docker/ to its end: its exit code and the one sentence that it leaves."""

    def run(*command: str, **environ: str) -> tuple[int, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "AWS_", "HPO_"))}
        done = subprocess.run([sys.executable, *command], env=inherited | environ, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""

    return run


@pytest.fixture
def settings(tmp_path):
    """What MLflow's container is started with, secrets as files."""
    for name in SECRETS:
        (tmp_path / name).write_text(
            "postgresql+psycopg://hpo:geheim@127.0.0.1:1/mlflow" if "URI" in name else "secret"
        )
    return SETTINGS | {f"{name}_FILE": str(tmp_path / name) for name in SECRETS}


def mlflow(said, settings, word="serve"):
    return said(str(DOCKER / "mlflow_server.py"), *word.split(), **settings)


@pytest.mark.parametrize("name", SECRETS)
def test_mlflow_names_the_secret_that_is_missing_or_empty(said, settings, tmp_path, name):
    (tmp_path / name).write_text("\n")
    assert mlflow(said, settings) == (
        1,
        f"mlflow: {name}_FILE: {tmp_path / name} is empty: write the secret into that file.",
    )
    (tmp_path / name).unlink()
    code, sentence = mlflow(said, settings)
    assert code == 1 and f"mlflow: {name}_FILE: {tmp_path / name} cannot be read (No such file" in sentence
    assert mlflow(said, settings | {f"{name}_FILE": ""})[1] == (
        f"mlflow: {name}_FILE is not set: name the file that holds {name}."
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_mlflow_names_the_setting_that_is_missing(said, settings, name):
    assert mlflow(said, settings | {name: ""}) == (
        1,
        f"mlflow: {name} is not set: docker/README.md says what it is for.",
    )


def test_mlflow_says_that_its_port_is_taken(said, settings):
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # else another process has it already
            stack.enter_context(socket.create_server(("127.0.0.1", 5000)))
        code, sentence = mlflow(said, settings)
    assert code == 1 and re.match(r"mlflow: port 5000 is taken \(.*\): stop what listens there", sentence)


def test_mlflow_hides_the_password_of_a_database_that_does_not_answer(said, settings):
    code, sentence = mlflow(said, settings, "migrate")
    assert code == 1 and "geheim" not in sentence
    assert sentence.startswith("mlflow: postgresql+psycopg://hpo:***@127.0.0.1:1/mlflow does not answer (")


def test_mlflow_knows_two_words(said, settings):
    assert mlflow(said, settings, "serv") == (1, "mlflow: serv: give serve or migrate.")


def test_a_store_that_cannot_be_reached_is_named(said):
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    where = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}
    code, sentence = said(str(DOCKER / "make_buckets.py"), "hpo", **keys, **where)
    assert code == 1
    assert sentence.startswith("buckets: http://127.0.0.1:1 did not make hpo (Could not connect")
    assert sentence.endswith("check S3_ENDPOINT and the keys in secrets/.")
    code, sentence = said(str(DOCKER / "make_buckets.py"), "hpo", **where, AWS_ACCESS_KEY_ID_FILE="/nowhere")
    assert code == 1 and sentence.startswith("buckets: AWS_ACCESS_KEY_ID_FILE: /nowhere cannot be read")


def test_a_ledger_that_starts_late_is_waited_for(process, postgres_server):
    server = postgres_server()
    url = server.url.render_as_string(hide_password=False)
    server.stop()
    migrate = [sys.executable, "-m", "hpo", "migrate", "--storage", url, "--wait", "60"]
    with subprocess.Popen(migrate, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as waiting:
        assert waiting.stderr is not None
        assert "does not answer" in waiting.stderr.readline()
        server.start()
        said = waiting.stderr.read()
    assert waiting.returncode == 0 and re.search(r" answers again, after \d+ s\.$", said.strip())


def test_a_ledger_that_never_starts_ends_the_job(said):
    url = "postgresql+psycopg://hpo:geheim@127.0.0.1:1/hpo"
    code, sentence = said("-m", "hpo", "migrate", "--storage", url, "--wait", "1")
    assert code == 75
    assert sentence.startswith("error: the ledger postgresql+psycopg://hpo:***@127.0.0.1:1/hpo does not answer (")


@pytest.mark.skipif(os.geteuid() != 0, reason="runs as root, who alone can become the user of a container")
def test_a_volume_that_cannot_be_written_is_named(process, tmp_path):
    home = Path(tempfile.mkdtemp(prefix="hpo-volume-"))  # pytest's own directories are closed to other users
    home.chmod(0o755)
    user = ["setpriv", "--reuid=10001", "--regid=10001", "--clear-groups"]
    if subprocess.run([*user, sys.executable, "-c", "import hpo"], cwd="/", capture_output=True).returncode:
        pytest.skip("runs where other users may read this Python and the project")
    command = [*user, sys.executable, "-m", "hpo", "run", "--study", "mlp", "--trials", "1", "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HOME": "/tmp"}, cwd="/")
    home.rmdir()
    assert done.returncode == 2
    assert f"home {home} cannot be written (Permission denied): choose another with --home or HPO_HOME." in done.stderr


@pytest.mark.parametrize(("part", "named"), [("database", 'database "nowhere"'), ("username", 'role "nowhere"')])
def test_a_server_that_lets_nobody_in_is_not_waited_for(said, postgres_server, part, named):
    url = postgres_server().url.set(**{part: "nowhere"}).render_as_string(hide_password=False)
    code, sentence = said("-m", "hpo", "migrate", "--wait", "1000", HPO_STORAGE=url)
    assert code == 2
    assert "is not open to you (" in sentence and f"{named} does not exist): check user, password and data" in sentence
