"""An MLflow that is reached over TLS, by MLFLOW_TRACKING_SERVER_CERT_PATH and an authority of the test's own."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import mlflow_service
import pytest
from certificates import Authority
from crafted import open_crafted, put_trial
from places import HARNESS
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.tracking import mirror_process
from hpo.tracking.base import Unreachable
from hpo.tracking.mlflow import client
from hpo.tracking.mlflow.tracker import MlflowTracker

CERTIFICATES = "MLFLOW_TRACKING_SERVER_CERT_PATH"
RUN = ("run", "--study", str(HARNESS / "function_study.py"), "--trials", "1", "--sampler", "random", "--workers", "1")
NOTICE = "reading the study and its data ..."  # where that takes long
UNKNOWN = "(certificate verify failed: unable to get local issuer certificate)"
FIX = (
    "name the file of the authority that has signed its certificate in MLFLOW_TRACKING_SERVER_CERT_PATH, and its host "
    "in --tracking-uri as the certificate does"
)


class Secured(NamedTuple):
    """A web server at localhost over TLS, and the authority that has signed its certificate."""

    uri: str
    authority: Authority


@pytest.fixture(scope="module")
def secured(tmp_path_factory) -> Iterator[Secured]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.certify("localhost"))
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Secured(f"https://localhost:{server.server_port}", authority)
        server.shutdown()


@pytest.fixture(autouse=True)
def _without_trust(monkeypatch) -> None:
    for name in (CERTIFICATES, "MLFLOW_TRACKING_INSECURE_TLS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.whole
def test_a_study_is_tracked_over_verified_tls(tmp_path, empty_mlflow, monkeypatch):
    authority = Authority(tmp_path / "authority")
    (root := tmp_path / "mlflow").mkdir()
    with mlflow_service.serving(root, empty_mlflow, authority.certify("localhost")) as uri:
        monkeypatch.setenv(CERTIFICATES, str(authority.file))
        command = [sys.executable, "-m", "hpo", *RUN, "--tracking-uri", uri, "--home", str(tmp_path / "home")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "behind" not in done.stdout + done.stderr
        trusting = ssl.create_default_context(cafile=authority.file)
        search = f"{uri}/api/2.0/mlflow/experiments/get-by-name?experiment_name=tiny"
        with urllib.request.urlopen(search, timeout=10, context=trusting) as answer:
            assert answer.status == 200
    assert not (tmp_path / "home" / "mlflow.db").exists()


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    (tmp_path / "text.pem").write_text("no certificate")
    other = Authority(tmp_path / "other").file
    return {"of another authority": other, "text": tmp_path / "text.pem", "missing": tmp_path / "missing.pem"}


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("of another authority", UNKNOWN),
        ("", UNKNOWN),
        ("text", "/text.pem holds no certificate)"),
        ("missing", "/missing.pem)"),
    ],
)
def test_a_new_study_is_refused_where_its_server_does_not_verify(file, says, secured, files, tmp_path, monkeypatch):
    if file:
        monkeypatch.setenv(CERTIFICATES, str(files[file]))
    assert says in refused(secured.uri, tmp_path)


def test_a_server_of_another_name_is_refused(secured, tmp_path, monkeypatch):
    monkeypatch.setenv(CERTIFICATES, str(secured.authority.file))
    assert "'127.0.0.1'" in refused(secured.uri.replace("localhost", "127.0.0.1"), tmp_path)


def refused(uri: str, directory: Path) -> str:
    """Returns the one error of `hpo run`, which waits for nothing, leaves with exit code 2 and writes nothing."""
    words = [*RUN, "--tracking-uri", uri, "--home", str(directory / "home"), "--outage-wait", "1h"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    [*_, sentence] = lines = result.stderr.splitlines()
    assert lines in ([sentence], [NOTICE, sentence])
    assert sentence.startswith(f"error: MLflow at {uri} cannot be trusted (") and sentence.endswith(f"): {FIX}.")
    assert not (directory / "home").exists()
    return sentence


def test_a_study_that_has_begun_trains_on_and_says_so(secured):
    """A certificate that runs out while a study trains stops no training."""
    notice = client.silence(secured.uri)
    assert notice.startswith(f"MLflow at {secured.uri} cannot be trusted {UNKNOWN}: {FIX}; training goes on, ")


def test_a_sync_says_why_it_sends_nothing(secured, home, monkeypatch):
    home.create()
    with closing(open_crafted(home.root / "ledger.db")) as ledger:
        put_trial(ledger, 0, "complete", (0.5,))
    monkeypatch.setattr(mirror_process, "drain", partial(mirror_process.drain, seconds=0.1))  # it tries for so long
    synced = CliRunner().invoke(app, ["sync", "--home", str(home.root), "--tracking-uri", secured.uri])
    [line] = synced.output.splitlines()
    assert synced.exit_code == 1 and f"(MLflow at {secured.uri} cannot be trusted {UNKNOWN}: {FIX}): run `" in line


def test_a_server_that_verifies_is_trusted(secured, monkeypatch):
    monkeypatch.setenv(CERTIFICATES, str(secured.authority.file))
    assert (client.untrusted(secured.uri), client.silence(secured.uri)) == ("", "")
    monkeypatch.delenv(CERTIFICATES)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(secured.authority.file))
    assert client.untrusted(secured.uri) == ""


def test_verification_is_turned_off_by_its_own_variable_alone(secured, tmp_path, monkeypatch):
    """MLflow verifies nothing where the file's variable is set and empty; hpo takes it for unset."""
    monkeypatch.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
    assert client.untrusted(secured.uri) == ""
    monkeypatch.delenv("MLFLOW_TRACKING_INSECURE_TLS")
    monkeypatch.setenv(CERTIFICATES, "")
    assert UNKNOWN in client.untrusted(secured.uri)
    with pytest.raises(Unreachable, match="cannot be trusted"):
        MlflowTracker(secured.uri, tmp_path).models("tiny")


def test_a_server_that_does_not_speak_tls_or_answer_is_no_mistake(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        uri = f"https://localhost:{listening.getsockname()[1]}"
        assert client.untrusted(uri, 0.2) == ""
    assert client.untrusted(uri, 0.2) == ""
    client.check_trust(f"sqlite:///{tmp_path / 'mlflow.db'}")
