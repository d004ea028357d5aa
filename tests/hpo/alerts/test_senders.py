"""Each way to send: what arrives, and what is said of a server that refuses, hangs, fails or is busy."""

from __future__ import annotations

import email.utils
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message as Mail
from types import SimpleNamespace
from typing import Any

import pytest
from made_rows import study_row
from receivers import receiver, refusing, silent

from hpo.alerts import by_apprise, senders
from hpo.alerts.delivery_errors import NotTaken, Undelivered
from hpo.alerts.events import Event
from hpo.alerts.message import content, message
from hpo.alerts.senders import send

STUDY = study_row(uid="u" * 32, name="s")
AT = "2026-01-02T03:04:05+00:00"
FAILED = Event("trial/3/failure", "failure", "trial 3 of study s has failed", "<!channel> & @everyone", 3)
ONE = message([content(STUDY, FAILED, AT)])


@pytest.fixture
def secret(tmp_path):
    """Writes what is secret into a file; the target that names it."""

    def write(text: str, kind: str = "webhook") -> str:
        (tmp_path / "secret").write_text(text + "\n")
        return f"{kind}:@{tmp_path / 'secret'}"

    return write


def test_a_webhook_gets_the_event_with_its_id(secret, monkeypatch):
    with receiver() as server:
        send(secret(server.url), ONE)
        monkeypatch.setenv("HOOK", server.url)
        send("webhook:env:HOOK", ONE)
    assert [got.id for got in server.got] == [f"{'u' * 32}/trial/3/failure"] * 2 == [server.got[0].body["id"]] * 2
    assert server.got[0].path == "/hook/of-mine"
    assert server.got[0].body == dict(ONE.content) and ONE.content["trial"] == 3


def test_what_a_server_answers_decides(secret):
    """What will never be taken is told from what may be later; a wish to wait is passed on; nothing is redirected."""
    dated = email.utils.format_datetime(email.utils.localtime().replace(microsecond=0), usegmt=False)
    answers: list[Any] = [
        (500, {}), (429, {"Retry-After": "7"}), (503, {"Retry-After": dated}), (404, {}), (400, {}),
        (302, {"Location": "http://127.0.0.1:9/"}),
    ]  # fmt: skip
    found = []
    with receiver(lambda n: answers[n]) as server:
        for _ in answers:
            with pytest.raises(Undelivered) as caught:
                send(secret(server.url), ONE)
            assert "of-mine" not in str(caught.value)
            found.append((str(caught.value), caught.value.after, type(caught.value) is NotTaken))
    assert found[0] == ("it answers 500: no", None, False)
    assert found[1] == ("it answers 429: no", 7.0, False)
    assert found[2][1] == 0.0
    assert [refused for *_, refused in found] == [False, False, False, False, True, False]
    assert "a redirection is not followed" in found[5][0]
    assert len(server.got) == len(answers)


def test_a_server_that_is_not_there_hangs_or_talks_nonsense(secret, monkeypatch, tmp_path):
    monkeypatch.setattr(senders, "TIMEOUT", 0.3)
    with pytest.raises(Undelivered, match=r"it cannot be reached \(Connection refused\)"):
        send(secret(refusing()), ONE)
    with silent() as url, pytest.raises(Undelivered, match=r"does not answer within 0.3 seconds"):
        send(secret(url), ONE)
    with pytest.raises(Undelivered, match="its host is not known"):
        send(secret("http://no-such-host.invalid/x"), ONE)
    for text, why in [("ftp://x/y", "holds no http or https URL"), ("", "holds nothing")]:
        with pytest.raises(Undelivered, match=why):
            send(secret(text), ONE)
    with pytest.raises(Undelivered, match=r"cannot be read \(No such file or directory\)"):
        send(f"slack:@{tmp_path / 'gone'}", ONE)
    with pytest.raises(Undelivered, match="env:NONE holds nothing"):
        send("slack:env:NONE", ONE)
    (tmp_path / "secret").write_bytes(b"\xff\xfe")
    with pytest.raises(Undelivered, match="it is not text"):
        send(f"slack:@{tmp_path / 'secret'}", ONE)


# By Apprise


@pytest.fixture
def apprise() -> Any:
    return pytest.importorskip("apprise", reason="runs with pip install -e '.[apprise]'")


SLACK = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
DISCORD = "https://discord.com/api/webhooks/123456789012345678/abcdefghijklmnopqrstuvwxyz"


@pytest.mark.usefixtures("apprise")
def test_slack_and_discord_get_their_form_and_nobody_is_called(secret, monkeypatch):
    """The addresses are those that each gives for a webhook, as studies have stored them in a file all along."""
    from apprise.plugins.discord import NotifyDiscord
    from apprise.plugins.slack import NotifySlack

    long = message([content(STUDY, Event("e", "end", "t", "x" * 5000), AT)])
    with receiver() as server:
        monkeypatch.setattr(NotifySlack, "webhook_url", server.url)
        monkeypatch.setattr(NotifyDiscord, "notify_url", server.url)
        for address, kind in ((SLACK, "slack"), (DISCORD, "discord"), (SLACK, "apprise")):
            send(secret(address, kind), ONE)
        send(secret(DISCORD, "discord"), long)
    slack, discord, again, cut = (got.body for got in server.got)
    [shown] = slack["attachments"]
    assert shown["title"] == FAILED.title and shown["text"] == "&lt;\u200b!channel&gt; &amp; @\u200beveryone"
    assert [one["text"] for one in again["attachments"]] == [shown["text"]]
    assert discord["content"].splitlines() == [FAILED.title, "<\u200b!channel> & @\u200beveryone"]
    assert 1900 < len(cut["content"]) <= 2000
    assert "http" not in json.dumps([slack, discord]), "no picture is fetched from elsewhere"


@pytest.mark.usefixtures("apprise")
def test_what_apprise_cannot_send_is_one_sentence_without_the_address(secret, monkeypatch):
    from apprise.plugins.slack import NotifySlack

    with receiver(lambda n: (404, {})) as server:
        monkeypatch.setattr(NotifySlack, "webhook_url", server.url)
        cases = {
            SLACK: "Apprise could not send it .*404",
            refusing().replace("http://", "json://"): "Apprise could not send it .*[Cc]onnection",
            "https://example.org/TIiajkdnlazkcOXrIdevi7FQ": "its address is none that Apprise knows",
        }
        for address, why in cases.items():
            with pytest.raises(Undelivered, match=why) as caught:
                send(secret(address, "slack"), ONE)
            assert "TIiaj" not in str(caught.value)
    for text, why in [("", "holds nothing")]:
        with pytest.raises(Undelivered, match=why):
            send(secret(text, "apprise"), ONE)


def test_without_the_extra_it_is_one_sentence(secret, monkeypatch):
    monkeypatch.setenv("HPO_SMTP", "smtps://mail.example.org")
    monkeypatch.setattr(by_apprise.importlib.util, "find_spec", lambda name: None)
    for target in (secret(SLACK, "slack"), secret(DISCORD, "discord"), "mail:me@x.org"):
        with pytest.raises(Undelivered, match=r"^it needs Apprise: pip install 'hpo\[apprise\]'$"):
            send(target, ONE)


class Mailbox:
    """Keeps what it is sent; the address that is called `nobody` does not exist."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], Mail]] = []

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        if address.startswith("nobody"):
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        from email import message_from_bytes
        from email.policy import default

        self.mails.append((envelope.rcpt_tos, message_from_bytes(envelope.content, policy=default)))
        return "250 OK"


def _certificate(directory: Any) -> ssl.SSLContext:
    """A certificate of 127.0.0.1 that signs itself, in `directory`/cert.pem."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    key, cert = str(directory / "key.pem"), str(directory / "cert.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run([*made, *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


@contextmanager
def mail_server(**options: Any) -> Iterator[SimpleNamespace]:
    from aiosmtpd.controller import Controller

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    box = Mailbox()
    controller = Controller(box, hostname="127.0.0.1", port=port, ready_timeout=30, **options)
    controller.start()
    try:
        yield SimpleNamespace(box=box, port=port)
    finally:
        controller.stop()


@pytest.mark.usefixtures("apprise")
def test_a_mail_has_a_subject_the_id_and_its_receivers(monkeypatch):
    with mail_server() as server:
        monkeypatch.setenv("HPO_SMTP", f"smtp+plain://127.0.0.1:{server.port}?from=hpo@lab.org")
        for _ in range(2):
            send("mail:me@x.org,you@y.org", ONE)
        with pytest.raises(Undelivered, match=r"Apprise could not send it .*nobody@x.org"):
            send("mail:nobody@x.org", ONE)
        monkeypatch.setenv("HPO_SMTP", f"smtp+plain://127.0.0.1:{server.port}")
        send("mail:me@x.org", ONE)
    assert [to for to, _ in server.box.mails] == [["me@x.org"], ["you@y.org"]] * 2 + [["me@x.org"]]
    first = server.box.mails[0][1]
    assert (first["From"], first["Subject"]) == ("hpo@lab.org", "[hpo] trial 3 of study s has failed")
    assert {mail["Idempotency-Key"] for _, mail in server.box.mails} == {ONE.id}
    assert first.get_content().splitlines() == [FAILED.text]


def _login(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> Any:
    from aiosmtpd.smtp import AuthResult

    right = (data.login, data.password) == (b"me@lab.org", b"hunter/2")
    return AuthResult(success=right, handled=right)


@pytest.mark.usefixtures("apprise")
@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize("scheme", ["smtps", "smtp"])
def test_a_mail_by_tls_with_a_password(scheme, monkeypatch, tmp_path):
    context = _certificate(tmp_path)
    how: dict[str, Any] = {"ssl_context": context} if scheme == "smtps" else {"tls_context": context}
    plain = {} if scheme == "smtp" else {"auth_require_tls": False}  # it does not see the TLS around it
    with mail_server(authenticator=_login, auth_required=True, **how, **plain) as server:
        where = f"127.0.0.1:{server.port}"
        monkeypatch.setenv("HPO_SMTP", f"{scheme}://me%40lab.org:hunter%2F2@{where}")
        with pytest.raises(Undelivered, match="Apprise could not send it"):  # nobody vouches for the certificate
            send("mail:me@x.org", ONE)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        send("mail:me@x.org", ONE)
        monkeypatch.setenv("HPO_SMTP", f"{scheme}://me%40lab.org:wrong@{where}")
        with pytest.raises(Undelivered, match="Apprise could not send it") as caught:
            send("mail:me@x.org", ONE)
        assert "wrong" not in str(caught.value)
    assert [mail["From"] for _, mail in server.box.mails] == ["me@lab.org"]


@pytest.mark.usefixtures("apprise")
def test_a_mail_server_that_cannot_be_used(monkeypatch):
    cases = {
        "": "HPO_SMTP is not set: give smtps://HOST",
        "mail.example.org": "HPO_SMTP names no mail server",
        "smtp://host:port": "HPO_SMTP names no mail server",
        "smtp+plain://me:hunter2@127.0.0.1": "would send a password in the clear",
        refusing().replace("http", "smtp"): "Apprise could not send it",
    }
    for where, why in cases.items():
        monkeypatch.setenv("HPO_SMTP", where)
        with pytest.raises(Undelivered, match=why) as caught:
            send("mail:me@x.org", ONE)
        assert "hunter2" not in str(caught.value)
    with mail_server() as server:  # without TLS where it is asked for
        monkeypatch.setenv("HPO_SMTP", f"smtp://127.0.0.1:{server.port}")
        with pytest.raises(Undelivered, match="Apprise could not send it"):
            send("mail:me@x.org", ONE)
    assert server.box.mails == []


# A command


def test_a_command_gets_the_event_and_no_secret_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("HPO_STORAGE", "postgresql://me:hunter2@host/x")
    script = tmp_path / "told.sh"
    script.write_text(f'#!/bin/sh\ncat > "{tmp_path}/$1"\nenv > "{tmp_path}/env"\n')
    script.chmod(0o755)
    send(f"command:{script} 'the event'", ONE)
    assert json.loads((tmp_path / "the event").read_text()) == dict(ONE.content)
    environ = (tmp_path / "env").read_text()
    assert f"HPO_ALERT_ID={ONE.id}\n" in environ and "HPO_ALERT_EVENT=failure\n" in environ
    assert "hunter2" not in environ
    with pytest.raises(Undelivered, match=r"it ends with 3: what a pity"):
        send("command:sh -c 'echo what a pity >&2; exit 3'", ONE)
    with pytest.raises(Undelivered, match=r"it cannot be started \(Permission denied\)"):
        send(f"command:{tmp_path / 'env'}", ONE)


def test_a_command_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(senders, "COMMAND_TIMEOUT", 0.5)
    hanging = f"sh -c 'sleep 1000 & echo $! > {tmp_path}/pid; wait'"
    with pytest.raises(Undelivered, match=r"has not ended within 0.5 seconds and was stopped"):
        send(f"command:{hanging}", ONE)
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.usefixtures("process")
def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'mlflow', 'optuna', 'ray', 'pandas'}"
    code = f"import sys, hpo.alerts.senders; assert not {heavy} & set(sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
