"""Sends a message: to a webhook, to Slack's or Discord's, by SMTP, or to a command.

A secret is read from its file or variable at every try, so a new one counts at once, and stands in no error.
"""

from __future__ import annotations

import datetime
import email.utils
import hashlib
import json
import os
import shlex
import signal
import smtplib
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from hpo.alerts.message import Message
from hpo.errors import HpoError
from trainer.runtime.lifeline import die_with

TIMEOUT = 10.0  # seconds for a server to answer, or to take the next part of what is sent
COMMAND_TIMEOUT = 30.0  # seconds
SMTP = "HPO_SMTP"
_OURS = ("HPO_STORAGE", "HPO_TRACKING_URI", SMTP)  # secrets that are no affair of a command
_MAX_ANSWER = 200  # characters of an error that are shown
_LIMITS = {"slack": 3000, "discord": 2000}  # characters
_PLAIN = "smtp+plain"
_PORTS = {"smtps": 465, "smtp": 587, _PLAIN: 25}


class Undelivered(HpoError):
    """A target did not take a message: why, and after how many seconds it wants to be asked again, if it says so."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class NotTaken(Undelivered):
    """A target will never take this message, whatever becomes of others."""


def send(target: str, message: Message) -> None:
    """Send to a target of `rules.Rule`. Raises Undelivered."""
    kind, _, rest = target.partition(":")
    _SENDERS[kind](rest, message)


def _secret(where: str) -> str:
    """The content of `@FILE`, or of the variable `env:NAME`."""
    if where.startswith("@"):
        try:
            found = Path(where[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise Undelivered(f"its file {where[1:]} cannot be read ({reason})") from None
    else:
        found = os.environ.get(where.removeprefix("env:"), "").strip()
    if not found:
        raise Undelivered(f"{where.removeprefix('@')} holds nothing")
    return found


# Webhooks


def _webhook(body: Callable[[Message], Mapping[str, Any]]) -> Callable[[str, Message], None]:
    def post(where: str, message: Message) -> None:
        url = _secret(where)
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise Undelivered(f"{where.removeprefix('@')} holds no http or https URL")
        headers = {"Content-Type": "application/json", "User-Agent": "hpo"}
        headers["Idempotency-Key"] = message.id
        _post(urllib.request.Request(url, json.dumps(body(message)).encode(), headers, method="POST"))

    return post


class _Stay(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would become a GET."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def _post(request: urllib.request.Request) -> None:
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=TIMEOUT):
            return
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(error) from None
    except TimeoutError:
        raise Undelivered(f"it does not answer within {TIMEOUT:g} seconds") from None
    except urllib.error.URLError as error:
        raise Undelivered(_reason(error.reason)) from None
    except (OSError, ValueError) as error:  # an answer that is cut off or is no HTTP
        raise Undelivered(_reason(error)) from None
    except Exception as error:  # http.client's own, which share no other base
        raise Undelivered(f"it gives no answer in HTTP ({type(error).__name__})") from None


def _refused(error: urllib.error.HTTPError) -> Undelivered:
    with suppress(Exception):
        said = " ".join(error.read(_MAX_ANSWER).decode(errors="replace").split())
        if said:
            return _kind_of(error, f": {said}")
    return _kind_of(error, "")


def _kind_of(error: urllib.error.HTTPError, said: str) -> Undelivered:
    why = f"it answers {error.code}{said}"
    if error.code in (400, 413, 422):
        return NotTaken(why)
    if 300 <= error.code < 400:
        why += ", and a redirection is not followed: give the new address"
    return Undelivered(why, _seconds(error.headers.get("Retry-After", "")))


def _seconds(text: str) -> float | None:
    """Of Retry-After: seconds, or a date."""
    with suppress(ValueError):
        return max(float(text), 0.0)
    with suppress(ValueError, TypeError):
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    return None


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"it does not answer within {TIMEOUT:g} seconds"
    if isinstance(error, socket.gaierror):
        return "its host is not known"
    if isinstance(error, ssl.SSLError):
        return f"its TLS cannot be used ({error.reason or error})"
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be reached ({error.strerror})"
    return f"it gives no answer ({type(error).__name__})"


def _slack(message: Message) -> dict[str, Any]:
    text = f"*{message.title}*\n{message.text}".strip()
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):  # an error that holds <!channel> calls nobody
        text = text.replace(plain, escaped)
    return {"text": text[: _LIMITS["slack"]]}


def _discord(message: Message) -> dict[str, Any]:
    text = f"**{message.title}**\n{message.text}".strip()[: _LIMITS["discord"]]
    return {"content": text, "allowed_mentions": {"parse": []}}


# E-mail


def _mail(to: str, message: Message) -> None:
    server = _smtp_server()
    mail = EmailMessage()
    user = unquote(server.username or "")
    mail["From"] = parse_qs(server.query).get("from", [user if "@" in user else f"hpo@{socket.gethostname()}"])[0]
    mail["To"], mail["Subject"] = ", ".join(to.split(",")), " ".join(f"[hpo] {message.title}".split())
    mail["Date"] = datetime.datetime.fromisoformat(message.content["at"])
    mail["Message-ID"] = f"<{hashlib.sha256(message.id.encode()).hexdigest()[:40]}@hpo>"
    mail["Idempotency-Key"] = message.id
    mail.set_content(f"{message.text}\n")
    try:
        with _connected(server) as smtp:
            if user:
                smtp.login(user, unquote(server.password or ""))
            smtp.send_message(mail)
    except smtplib.SMTPRecipientsRefused as error:
        codes = {code for code, _ in error.recipients.values()}
        raise (NotTaken if min(codes) >= 500 else Undelivered)(f"its addresses are refused ({max(codes)})") from None
    except smtplib.SMTPResponseException as error:
        text = error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        raise Undelivered(f"the mail server answers {error.smtp_code} {' '.join(text.split())[:_MAX_ANSWER]}") from None
    except smtplib.SMTPException as error:
        raise Undelivered(f"the mail server does not take it ({error})") from None
    except OSError as error:
        raise Undelivered(f"the mail server: {_reason(error)}") from None


def _smtp_server() -> SplitResult:
    """What HPO_SMTP names: smtps:// has TLS from the start, smtp:// begins it, smtp+plain:// has none."""
    where = os.environ.get(SMTP, "").strip()
    how = "give smtps://HOST, or smtp://HOST for STARTTLS, with user and password before the host"
    try:
        parts = urlsplit(where)
        port = parts.port or 0
    except ValueError:
        parts, port = urlsplit(""), -1
    if parts.scheme not in _PORTS or not parts.hostname or port < 0:
        raise Undelivered(f"{SMTP} {'is not set' if not where else 'is no address of a mail server'}: {how}")
    if parts.scheme == _PLAIN and parts.username:
        raise Undelivered(f"{SMTP} would send a password in the clear: {how}")
    return parts


def _connected(server: SplitResult) -> smtplib.SMTP:
    where = (server.hostname or "", server.port or _PORTS[server.scheme])
    if server.scheme == "smtps":
        return smtplib.SMTP_SSL(*where, timeout=TIMEOUT, context=ssl.create_default_context())
    smtp = smtplib.SMTP(*where, timeout=TIMEOUT)
    if server.scheme == "smtp":
        try:
            smtp.starttls(context=ssl.create_default_context())
        except BaseException:
            smtp.close()
            raise
    return smtp


# A command


def _command(line: str, message: Message) -> None:
    """Run the user's own program with the event as JSON on its standard input, in a process group of its own, which is
    ended after a while and with this process."""
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    environ |= {"HPO_ALERT_ID": message.id, "HPO_ALERT_EVENT": message.content["event"]}
    parent = os.getpid()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(message.content).encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                shlex.split(line),
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environ,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )
        except OSError as error:
            raise Undelivered(f"it cannot be started ({error.strerror})") from None
        try:
            process.wait(COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Undelivered(f"it has not ended within {COMMAND_TIMEOUT:g} seconds and was stopped") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.wait()
        if process.returncode:
            errors.seek(0)
            said = " ".join(errors.read().decode(errors="replace").split())[-_MAX_ANSWER:]
            raise Undelivered(f"it ends with {process.returncode}{f': {said}' if said else ''}")


_SENDERS: dict[str, Callable[[str, Message], None]] = {
    "webhook": _webhook(lambda message: message.content),
    "slack": _webhook(_slack),
    "discord": _webhook(_discord),
    "mail": _mail,
    "command": _command,
}
