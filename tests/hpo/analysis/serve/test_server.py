"""`hpo serve`: its token, its answers over HTTP, its bad input, and the pages behind a proxy."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from typing import Any

import pytest
from crafted import open_crafted, put_trial
from rounds import rounds
from served import HOST, get, port_of, served
from study_runs import hpo

from hpo.analysis.serve import pages
from hpo.analysis.serve.server import bound, check_mlflow
from hpo.analysis.serve.trial_page import TAIL, run_link, tail
from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.tracking.ui.gate import token_of


def read_page(port: int, home: Home, path: str = "/study/crafted/", **headers: str) -> Any:
    """The page of a study, once that has been read."""
    while "data-unread" in (found := get(port, path, home, **headers))[2]:
        pass
    return found


@pytest.fixture
def home(tmp_path) -> Home:
    ledger = open_crafted(tmp_path / "ledger.db", names=("crafted", "other"))
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    ledger.close()
    return Home.at(tmp_path)


def test_every_address_asks_for_the_token_and_says_no_more(home):
    with served(home) as server:
        port = port_of(server)
        for path in (
            "/",
            "/events",
            "/study/crafted/",
            "/study/crafted/events",
            "/study/crafted/trial/0/",
            "/assets/x/y",
        ):
            for method in ("GET", "HEAD"):
                status, headers, text = get(port, path, method=method)
                assert status == 401 and "crafted" not in text and headers["cache-control"] == "no-store"
            assert get(port, path, home, method="POST")[0] == 405
            assert get(port, path, home, Host="evil.test")[0] == 403
            assert get(port, path, home, Origin="http://evil.test")[0] == 403
        assert get(port, "/health")[0] == 200
        assert get(port, "/?token=wrong")[0] == 401
        status, headers, text = get(port, f"/study/crafted/?token={token_of(home)}&a=1")
        cookie, *attributes = headers["set-cookie"].split("; ")
        assert status == 200 and {"HttpOnly", "SameSite=Strict", "Path=/"} == {*attributes}
        assert 'content="0; url=./crafted"' in get(port, f"/study/crafted?token={token_of(home)}")[2]
        assert 'content="0; url=./?a=1"' in text and token_of(home) not in text
        assert get(port, "/", Cookie=cookie)[0] == 200
    assert stat.S_IMODE((home.root / "ui.token").stat().st_mode) == 0o600


def test_answers_say_what_there_is_and_what_there_is_not(home):
    with served(home) as server:
        port = port_of(server)
        assert "crafted" in get(port, "/", home)[2] and "other" in get(port, "/", home)[2]
        for path in ("/study/crafted", "/study/crafted/trial/0"):
            status, headers, _ = get(port, path, home)
            assert (status, headers["location"]) == (307, f"./{path.rpartition('/')[2]}/")
        assert "it holds crafted, other" in get(port, "/study/nope/", home)[2]
        status, headers, text = read_page(port, home)
        assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
        for name in pages.FILES:
            assert f"../../assets/{pages.edition()}/{name}" in text
            status, headers, _ = get(port, f"/assets/{pages.edition()}/{name}", home)
            assert status == 200 and "immutable" in headers["cache-control"]
            assert headers["content-type"].startswith(("text/javascript", "text/css"))
        assert get(port, "/study/crafted/trial/0/", home)[0] == 200
        _, _, text = get(port, "/study/crafted/curves?metric=val/accuracy&along=epoch", home)
        assert json.loads(text) == {"0": [[1, 2], [0.5, 0.6]]}


def test_a_wrong_address_is_one_sentence(home):
    wrong = {
        "/study/nobody/": "no study 'nobody' in this ledger (it holds crafted, other)",
        "/study/crafted/trial/9/": "study 'crafted' has no trial 9: it has trials 0 to 0",
        "/study/crafted/trial/99999999999999999999/": "no study has a trial",
        "/study/crafted/curves?metric=": "metric has 0 characters",
        "/study/crafted/curves?metric=a&along=x": "along 'x' is not known",
        "/study/crafted/curves?metric=nope": "no trial of study 'crafted' has reported 'nope': there are val/accuracy.",
        "/study/crafted/curves?metric=val/acuracy": "did you mean 'val/accuracy'?",
        "/study/..%2f..%2fetc%2fpasswd/": "Not Found",
        "/assets/x/../../../etc/passwd": "Not Found",
        "/assets/x/..%2f..%2fpage.py": "Not Found",
        "/study/crafted/trial/-1/": "Not Found",
        "/study/crafted/trial/0/../../../x": "Not Found",
    }
    with served(home) as server:
        for path, says in wrong.items():
            status, _, text = get(port_of(server), path, home)
            assert status == 404 and says in text and text.count("\n") == 1, (path, text)


def test_a_damaged_ledger_is_told_in_one_sentence_and_the_server_lives(home):
    with served(home) as server:
        port = port_of(server)
        assert get(port, "/", home)[0] == 200
        with Ledger(home.storage).write() as connection:
            connection.exec_driver_sql("UPDATE studies SET spec = '[]' WHERE name = 'crafted'")
        for path in ("/", "/study/crafted/", "/study/crafted/trial/0/"):
            status, _, text = get(port, path, home)
            assert status == 503 and text.count("\n") == 1 and "damaged" in text, text
        assert read_page(port, home, "/study/other/")[0] == 200
        assert get(port, "/health")[0] == 200


class Proxy(http.server.BaseHTTPRequestHandler):
    """A proxy that shows a server below /hpo, with the prefix or without, under a name of its own."""

    target, keeps = 0, False

    def do_GET(self) -> None:
        path = self.path if self.keeps else self.path.removeprefix("/hpo")
        kept = {name: value for name, value in self.headers.items() if name.lower() in ("cookie", "host")}
        status, headers, text = get(self.target, path, **kept)
        self.send_response(status)
        for name in ("content-type", "set-cookie"):
            if name in headers:
                self.send_header(name, headers[name])
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("keeps", [True, False])
def test_behind_a_proxy_all_links_lead_through_it(keeps, home):
    allowed = {"allowed": ["hpo.example.org"], "prefix": "/hpo"}
    with served(home, **allowed) as server:
        proxy = http.server.ThreadingHTTPServer(
            (HOST, 0), type("Own", (Proxy,), {"target": port_of(server), "keeps": keeps})
        )
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        port, named = proxy.server_address[1], {"Host": "hpo.example.org"}
        status, headers, text = get(port, f"/hpo/?token={token_of(home)}", **named)
        assert status == 200 and "Path=/hpo;" in headers["set-cookie"] and 'url=./"' in text
        cookie = headers["set-cookie"].split(";")[0]
        status, _, text = read_page(port, home, "/hpo/study/crafted/", Cookie=cookie, **named)
        assert status == 200
        links = re.findall(r'(?:href|src)="([^"#]+)"', text)
        assert links and all(not one.startswith(("/", "http")) for one in links)
        for link in links:
            path = os.path.normpath(f"/hpo/study/crafted/{link}") + ("/" if link.endswith("/") else "")
            assert path.startswith("/hpo/") and get(port, path, Cookie=cookie, **named)[0] == 200, path
        assert get(port, "/hpo/", Cookie=cookie, Host="evil.test")[0] == 403
        proxy.shutdown()
        proxy.server_close()


def test_a_stream_names_its_cursor_and_ends_with_the_server(home):
    with served(home) as server:
        connection = http.client.HTTPConnection(HOST, port_of(server), timeout=60)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {token_of(home)}"})
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        lines = [answer.readline().decode().strip() for _ in range(5)]
        assert lines[0] == "retry: 1000" and "event: refresh" in lines and any(one.startswith("id: ") for one in lines)
    answer.read()  # the rest, to its end
    connection.close()


def test_postgres_homes_are_shown_too(postgres_database, tmp_path):
    url = postgres_database()
    Ledger(url).close()
    with served(Home.at(tmp_path).create(), storage=url) as server:
        assert "There is no study yet" in get(port_of(server), "/", Home.at(tmp_path))[2]
    only_read = Ledger(url, create=False, read_only=True)
    with pytest.raises(Exception, match="read-only"), only_read.write() as connection:
        connection.exec_driver_sql("DELETE FROM studies")
    only_read.close()


# What the command says


@pytest.mark.whole
@rounds(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--host '0.0.0.0' is not loopback"),
        (["--allowed-host", "https://a.b"], "--allowed-host 'https://a.b' is not a host name"),
        (["--root-path", "hpo"], "--root-path 'hpo' is not a path"),
        (["--mlflow", "javascript:alert(1)"], "--mlflow 'javascript:alert(1)' is not the address of a page"),
        (["--port", "0"], "--port 0: give a whole number from 1 to 65535"),
        (["--storage", "sqlite:////nowhere/ledger.db"], "the ledger /nowhere/ledger.db does not exist"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments, says, home):
    result = hpo("serve", *arguments, home=home)
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_taken_port_and_a_missing_extra_are_one_sentence(monkeypatch):
    with (
        bound(HOST, 0, ()) as taken,
        pytest.raises(UserError, match=r"cannot be used \(Address already in use\): give"),
    ):
        bound(HOST, taken.getsockname()[1], ())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "starlette" else object())
    with pytest.raises(UserError, match=r"need starlette: pip install 'hpo\[serve\]'"):
        pages.check_installed()


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_although_streams_are_open(number, home, process):
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hpo", "serve", "--home", str(home.root), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert (
            line == f"the studies of this home are at http://{HOST}:{port}/?token={token_of(home)} (Ctrl-C stops it)\n"
        )
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {token_of(home)}"})
        answer = connection.getresponse()
        answer.readline()
        server.send_signal(number)
        answer.read()
        assert server.wait(60) == (0 if number == signal.SIGINT else -number)
        connection.close()


# Logs and links


def test_only_the_end_of_a_long_log_is_shown(tmp_path):
    file = tmp_path / "a.log"
    file.write_bytes(b"\xff first\n" + b"x" * 99 + b"\n")
    assert tail(file).startswith("\ufffd first\n")
    file.write_bytes(b"".join(b"line %05d\n" % i for i in range(10_000)))
    shown = tail(file)
    assert shown.startswith("... 77232 bytes before are left out\nline ") and shown.endswith("line 09999\n")
    assert len(shown) <= TAIL + 100


def test_runs_are_linked_where_their_pages_are_known():
    assert run_link("http://mlflow:5000/x", "a/b", "") == "http://mlflow:5000/x/#/runs/a%2Fb"
    assert run_link("sqlite:////h/mlflow.db", "a", "http://127.0.0.1:5000/") == "http://127.0.0.1:5000/#/runs/a"
    assert run_link("sqlite:////h/mlflow.db", "a", "") == ""
    assert run_link("wandb:/dir", "a", "http://x") == run_link("optuna+sqlite:///a", "a", "http://x") == ""
    assert check_mlflow(None) == "" and check_mlflow("https://a") == "https://a"
    for wrong in ("javascript:alert(1)", "http://", "http://[", "a", "http://127.0.0.1:5000/?token=secret"):
        with pytest.raises(UserError, match="--mlflow"):
            check_mlflow(wrong)


def test_a_study_is_shown_before_anything_heavy_is_imported(home, process):
    """Importing torch or Optuna would take seconds of the first paint."""
    code = f"""
import sys
from hpo.analysis.serve.live_study import LiveStudy
from hpo.analysis.serve.server import Server
from hpo.ledger import Ledger
from hpo.storage.home import Home

home = Home.at({str(home.root)!r})
LiveStudy(Ledger(home.storage, create=False, read_only=True), home, "crafted").look()
print([name for name in ("torch", "optuna", "mlflow", "pandas", "scipy", "plotly") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
