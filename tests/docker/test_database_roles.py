"""The roles that databases.sql makes on a real PostgreSQL: a study runs as one, and it can do nothing outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from compose_file import DOCKER
from places import HARNESS
from sqlalchemy.exc import DBAPIError

APART: Any = {"start_new_session": True, "capture_output": True}  # from the terminal, which asks for passwords
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

# Each would read or change what is not the role's own database; with the words of PostgreSQL's refusal.
REFUSED = {
    "COPY (SELECT 1) TO PROGRAM 'touch {marker}'": "permission denied to COPY to or from an external program",
    "COPY trials TO '{marker}'": "permission denied to COPY to a file",
    "CREATE TEMP TABLE t (line text); COPY t FROM '/etc/passwd'": "permission denied to COPY from a file",
    "SELECT pg_read_file('/etc/passwd')": "permission denied for function pg_read_file",
    "CREATE FUNCTION f() RETURNS int AS '/lib/x86_64-linux-gnu/libc.so.6', 'getpid' LANGUAGE c": "language c",
    "ALTER ROLE hpo SUPERUSER": "permission denied to alter role",
    "CREATE ROLE another SUPERUSER": "permission denied to create role",
    "CREATE DATABASE another": "permission denied to create database",
    "SELECT rolpassword FROM pg_authid": "permission denied for table pg_authid",
    "SET ROLE mlflow": 'permission denied to set role "mlflow"',
    "ALTER SYSTEM SET archive_command = 'touch {marker}'": "permission denied to set parameter",
}


@pytest.fixture(scope="module")
def server(postgres_server, tmp_path_factory) -> sa.URL:
    """The URL of a server whose superuser has run databases.sql as PostgreSQL's image does."""
    postgres, secrets = postgres_server(), tmp_path_factory.mktemp("secrets")
    environ = dict(os.environ)
    for role in ("hpo", "mlflow"):
        (secrets / role).write_text(f"it's-of-{role}\n")
        environ[f"{role.upper()}_DATABASE_PASSWORD_FILE"] = str(secrets / role)
    quiet = ["-v", "ON_ERROR_STOP=1", "--no-password", "--no-psqlrc"]
    place = ["-h", postgres.url.query["host"], "-U", "postgres", "-d", "postgres"]
    psql = [postgres.programs / "psql", *quiet, *place, "-f", DOCKER / "databases.sql"]
    made = subprocess.run(psql, env=environ, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return postgres.url


def url_of(server: sa.URL, role: str, database: str) -> sa.URL:
    return server.set(username=role, password=f"it's-of-{role}", database=database)


@contextmanager
def connected(url: sa.URL) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


@pytest.fixture(scope="module")
def searched(server, tmp_path_factory) -> sa.URL:
    """The URL of the ledger in which the role of Compose has run a study."""
    url = url_of(server, "hpo", "hpo")
    home = tmp_path_factory.mktemp("role") / "home"
    command = [sys.executable, "-m", "hpo", "run", "--study", str(HARNESS / "tiny_study.py"), "--trials", "2"]
    command += ["--strategy", "none", "-o", "train.num_epochs=1", "--home", str(home)]
    environ = os.environ | {"HPO_STORAGE": url.render_as_string(hide_password=False)}
    ran = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout
    return url


def test_the_roles_own_their_databases_and_are_plain(server):
    roles = sa.text("SELECT rolname, rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls FROM pg_roles")
    owners = sa.text("SELECT datname, pg_get_userbyid(datdba) FROM pg_database")
    member = sa.text("SELECT count(*) FROM pg_auth_members WHERE member IN ('hpo'::regrole, 'mlflow'::regrole)")
    with connected(server) as connection:
        rights = {name: rest for name, *rest in connection.execute(roles)}
        owned = {row[0]: row[1] for row in connection.execute(owners)}
        assert connection.execute(member).scalar_one() == 0
    assert rights["hpo"] == rights["mlflow"] == [False] * 5
    assert (owned["hpo"], owned["mlflow"], owned["mlflow_users"]) == ("hpo", "mlflow", "mlflow")


def test_a_study_runs_as_the_role(searched):
    with connected(searched) as connection:
        assert connection.execute(sa.text("SELECT state FROM trials")).scalars().all() == ["complete"] * 2
        owners = sa.text("SELECT DISTINCT tableowner FROM pg_tables WHERE tablename = 'trials'")
        assert connection.execute(owners).scalars().all() == ["hpo"]


@pytest.mark.parametrize("statement", REFUSED)
def test_the_role_can_do_nothing_outside_its_database(searched, statement):
    marker = Path(tempfile.gettempdir(), f"hpo-role-{os.getpid()}")
    with connected(searched) as connection, pytest.raises(DBAPIError) as refusal:
        connection.exec_driver_sql(statement.format(marker=marker))
    assert REFUSED[statement] in str(refusal.value)
    assert not marker.exists()


@pytest.mark.parametrize(("role", "database"), [("hpo", "mlflow"), ("hpo", "postgres"), ("mlflow", "hpo")])
def test_a_role_connects_to_its_own_databases_alone(server, role, database):
    refused = pytest.raises(DBAPIError, match=f'permission denied for database "{database}"')
    with refused, connected(url_of(server, role, database)):
        pass


def test_the_role_of_the_guide_is_plain_too(postgres_server):
    postgres = postgres_server()
    page = (DOCKER.parent / "docs" / "guide" / "deploy.md").read_text()
    commands = re.findall(r"^    (create(?:user|db) .*?)(?:  +#.*)?$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["createuser", "createdb"]
    there = os.environ | {"PGHOST": str(postgres.url.query["host"]), "PGUSER": str(postgres.url.username)}
    for command in commands:
        name, *words = command.split()
        program = [postgres.programs / name, *words]
        subprocess.run(program, input="secret\nsecret\n", text=True, check=True, env=there, **APART)
    with connected(postgres.url.set(username="hpo", password="secret", database="hpo")) as connection:
        connection.exec_driver_sql("CREATE TABLE t (x int)")
        with pytest.raises(DBAPIError, match="permission denied to COPY to or from an external program"):
            connection.exec_driver_sql("COPY t TO PROGRAM 'true'")
