"""A ledger on a PostgreSQL that takes TLS alone, by `sslmode=verify-full` and an authority of the test's own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import sqlalchemy as sa
from certificates import Authority
from encrypted_postgres import PASSWORD, programs, serving
from places import HARNESS
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from trainer.files import outage

pytestmark = pytest.mark.skipif(programs() is None, reason="runs after `apt-get install postgresql`")

STUDY = str(HARNESS / "function_study.py")


class Encrypted(NamedTuple):
    """A server at localhost, its URL, and the authority that has signed its certificate."""

    url: sa.URL
    authority: Authority

    def storage(self, **parts: str) -> str:
        """Returns a URL of the server; `parts` are those in which it differs from the right one."""
        query = {"sslmode": "verify-full", "sslrootcert": str(self.authority.file)}
        host = parts.pop("host", "localhost")
        query = {name: value for name, value in (query | parts).items() if value}
        return self.url.set(host=host, query=query).render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory) -> Iterator[Encrypted]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with serving(authority.certify("localhost")) as url:
        yield Encrypted(url, authority)


@pytest.fixture(scope="module")
def unencrypted() -> Iterator[sa.URL]:
    with serving(None) as url:
        yield url


@pytest.mark.whole
def test_a_study_runs_and_resumes_over_verified_tls(encrypted, tmp_path, empty_mlflow):
    there = ("--home", str(tmp_path / "home"), "--storage", encrypted.storage())
    (tmp_path / "home").mkdir(mode=0o700)
    shutil.copyfile(empty_mlflow, tmp_path / "home" / "mlflow.db")

    def hpo(*words: str) -> None:
        done = subprocess.run([sys.executable, "-m", "hpo", *words, *there], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr

    hpo("run", "--study", STUDY, "--trials", "1", "--workers", "1", "--sampler", "random")
    hpo("resume", "--study", "tiny", "--trials", "2", "--executor", "inline")
    status = json.loads(CliRunner().invoke(app, ["status", "--study", "tiny", "--json", *there]).stdout)
    assert (status["state"], sum(status["trials"].values())) == ("complete", 2)


@pytest.fixture
def files(encrypted, tmp_path) -> dict[str, str]:
    """Returns files by the names that the cases below give them."""
    other = Authority(tmp_path / "other")
    client = encrypted.authority.certify("client")
    (tmp_path / "text.pem").write_text("no certificate")
    return {
        "of another authority": str(other.file),
        "missing": str(tmp_path / "missing.pem"),
        "text": str(tmp_path / "text.pem"),
        "client": str(client.certificate),
        "key of another": str(other.certify("client").key),
    }


UNMET = "cannot be connected to as its URL demands ("
CASES = {
    "another authority": (
        {"sslrootcert": "of another authority"},
        "certificate verify failed): name the file of the authority that has signed the server's certificate as sslro",
    ),
    "another host's name": (
        {"host": "127.0.0.1"},
        'does not match host name "127.0.0.1"): name the host as the server\'s certificate does in the URL of --stor',
    ),
    "no file": ({"sslrootcert": "missing"}, "does not exist): correct sslmode, sslrootcert, sslcert and sslkey in the"),
    "no certificate": ({"sslrootcert": "text"}, "could not read root certificate file"),
    "another's key": ({"sslcert": "client", "sslkey": "key of another"}, "could not load private key file"),
    "no such mode": ({"sslmode": "verify"}, 'invalid sslmode value: "verify"): correct that parameter in the URL of'),
    "no such parameter": ({"sslrotcert": "x"}, 'invalid connection option "sslrotcert"): correct that parameter in'),
}


@pytest.mark.parametrize(("parts", "says"), CASES.values(), ids=CASES)
def test_what_does_not_verify_is_refused_in_a_sentence_at_once(parts, says, encrypted, files, tmp_path):
    storage = encrypted.storage(**{name: files.get(value, value) for name, value in parts.items()})
    sentence = refused(storage, tmp_path)
    assert UNMET in sentence and says in sentence


def refused(storage: str, directory: Path) -> str:
    """Returns the one error of `hpo run`, which waits for nothing, leaves with exit code 2 and shows no password."""
    flags = ["--study", STUDY, "--trials", "1", "--storage", storage, "--outage-wait", "1h"]
    result = CliRunner().invoke(app, ["run", *flags, "--home", str(directory / "home")])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert PASSWORD not in result.stderr
    [*_, sentence] = lines = result.stderr.splitlines()
    assert lines in ([sentence], ["reading the study and its data ...", sentence])
    assert sentence.startswith("error: the ledger postgresql")
    return sentence


def test_a_connection_without_tls_is_refused_by_the_servers_rules(encrypted, tmp_path):
    sentence = refused(encrypted.storage(sslmode="disable", sslrootcert=""), tmp_path)
    assert "no encryption): check user, password, database and sslmode in the URL of --storage" in sentence


def test_a_server_without_tls_is_named(unencrypted, encrypted, tmp_path):
    query = {"sslmode": "verify-full", "sslrootcert": str(encrypted.authority.file)}
    sentence = refused(unencrypted.update_query_dict(query).render_as_string(hide_password=False), tmp_path)
    assert (
        UNMET in sentence and "server does not support SSL, but SSL was required): turn TLS on in the ser" in sentence
    )


def test_a_server_that_is_down_is_still_waited_for(encrypted):
    """The words of an outage are not mistaken for those of a certificate, whatever the files are called."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = sa.make_url(encrypted.storage()).set(port=port).update_query_dict({"application_name": "certificate"})
    with outage.waiting(1.0), pytest.raises(Exception, match="does not answer") as caught:
        Ledger(url.render_as_string(hide_password=False))
    assert getattr(caught.value, "exit_code", None) == outage.EXIT_CODE
