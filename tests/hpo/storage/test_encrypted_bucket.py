"""Checkpoints in a bucket that is reached over TLS, by AWS_CA_BUNDLE and an authority of the test's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import s3_server
from certificates import Authority
from places import HARNESS
from typer.testing import CliRunner

from hpo.cli.main import app
from trainer.files import outage, s3
from trainer.files.s3 import Away, Bucket

RUN = ("run", "--study", str(HARNESS / "function_study.py"), "--trials", "1", "--sampler", "random", "--workers", "1")
URL = "s3://checkpoints/of/mine"
NOTICE = "reading the study and its data ..."  # where that takes long


class Secured(NamedTuple):
    """A server at localhost, its address, and the authority that has signed its certificate."""

    endpoint: str
    authority: Authority


@pytest.fixture(scope="module")
def secured(tmp_path_factory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("authority")
    authority = Authority(directory)
    with s3_server.serving(directory, authority.certify("localhost")) as endpoint:
        assert endpoint.startswith("https://localhost:")
        yield Secured(endpoint, authority)


@pytest.fixture(autouse=True)
def trusting(secured, tmp_path, monkeypatch) -> Iterator[None]:
    """This process and those that it starts trust the authority."""
    given = s3_server.environ(secured.endpoint, tmp_path) | {"AWS_CA_BUNDLE": str(secured.authority.file)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    s3._client.cache_clear()  # a client keeps the authority that it has begun with
    yield
    s3._client.cache_clear()


@pytest.mark.whole
def test_checkpoints_go_to_a_bucket_over_verified_tls(tmp_path, empty_mlflow):
    Bucket(URL)._asked(lambda client: client.create_bucket(Bucket="checkpoints"))
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    shutil.copyfile(empty_mlflow, home / "mlflow.db")
    command = [sys.executable, "-m", "hpo", *RUN, "--checkpoints", URL, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(key.endswith("manifest.json") for key in Bucket("s3://checkpoints").keys("of/mine"))
    assert not list(home.rglob("manifest.json"))


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    (tmp_path / "text.pem").write_text("no certificate")
    other = Authority(tmp_path / "other").file
    return {"of another authority": other, "text": tmp_path / "text.pem", "missing": tmp_path / "missing.pem"}


@pytest.mark.parametrize(
    ("bundle", "says"),
    [
        ("of another authority", "(certificate verify failed: unable to get local issuer certificate)"),
        ("", "(certificate verify failed: unable to get local issuer certificate)"),
        ("text", "(AWS_CA_BUNDLE: no certificate or crl found)"),
        ("missing", "(AWS_CA_BUNDLE: No such file or directory)"),
    ],
)
def test_a_store_that_does_not_verify_is_refused_in_a_sentence(bundle, says, files, tmp_path, monkeypatch):
    if bundle:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(files[bundle]))
    else:
        monkeypatch.delenv("AWS_CA_BUNDLE")
    assert says in refused(tmp_path)


def test_a_store_of_another_name_is_refused_in_a_sentence(secured, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", secured.endpoint.replace("localhost", "127.0.0.1"))
    assert "(hostname '127.0.0.1' doesn't match 'localhost')" in refused(tmp_path)


def refused(directory: Path) -> str:
    """Returns the one error of `hpo run`, which waits for nothing, leaves with exit code 2 and writes nothing."""
    words = [*RUN, "--checkpoints", URL, "--home", str(directory / "home"), "--outage-wait", "1h"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    [*_, sentence] = lines = result.stderr.splitlines()
    assert lines in ([sentence], [NOTICE, sentence])
    assert sentence.startswith(f"error: --checkpoints {URL} cannot be trusted (")
    assert sentence.endswith("in AWS_CA_BUNDLE, and its host in AWS_ENDPOINT_URL as the certificate does.")
    assert not (directory / "home").exists()
    return sentence


def test_a_handshake_that_breaks_off_is_an_outage(monkeypatch):
    def hang_up() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            client.recv(1 << 16)
            client.close()

    with socket.create_server(("127.0.0.1", 0)) as listening, outage.waiting(0.0):
        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{listening.getsockname()[1]}")
        with pytest.raises(Away, match=r"cannot be reached \(the connection broke\): .*; it was tried up to 2 times"):
            Bucket(URL).check()
        listening.shutdown(socket.SHUT_RDWR)
