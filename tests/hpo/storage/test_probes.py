"""`--probes`: whether a process runs and whether its ledger answers, without a token and without content."""

from __future__ import annotations

import http.client
import socket
from contextlib import closing

import pytest

from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.storage.probes import answering


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.headers.keys() == ["Content-Length"], "nothing is said of the host"
        return answer.status, answer.read()


def test_what_runs_is_alive_and_ready_while_its_ledger_answers(tmp_path, port):
    with closing(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger, answering(str(port), ledger):
        assert {ask(port, path) for path in ("/healthz", "/health", "/readyz")} == {(200, b"")}
        assert ask(port, "/readyz", "HEAD") == (200, b"")
        assert {ask(port, path) for path in ("/", "/metrics", "/healthz/x", "/readyz?token=x")} == {(404, b"")}
        (tmp_path / "ledger.db").rename(tmp_path / "away.db")
        (tmp_path / "ledger.db").mkdir()
        ledger.close()  # the connections of its pool still have the file
        assert (ask(port, "/healthz"), ask(port, "/readyz")) == ((200, b""), (503, b""))
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/healthz")


def test_only_loopback_unless_a_host_is_named(tmp_path, port):
    with closing(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger:
        with answering(None, ledger), pytest.raises(ConnectionRefusedError):
            ask(port, "/healthz")
        with answering(f"localhost:{port}", ledger):
            assert ask(port, "/healthz") == (200, b"")
            with pytest.raises(UserError, match=rf"--probes {port}: it cannot be used \(.*\); give another\."):
                answering(str(port), ledger).__enter__()


@pytest.mark.parametrize("address", ["", "host", "70000", "a:b", "-1", "host:1:2"])
def test_an_address_that_is_none_is_refused(address, tmp_path):
    with (
        closing(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger,
        pytest.raises(UserError, match="give PORT or"),
    ):
        answering(address, ledger).__enter__()
