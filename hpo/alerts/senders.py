"""Sends a message to a webhook, to a command, or through Apprise to a chat, by mail or to another service.

A secret is read from its file or variable at every try, so a new one takes effect at once. No error contains it.
"""

from __future__ import annotations

import email.utils
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from hpo import secret_environment
from hpo.alerts import by_apprise
from hpo.alerts.delivery_errors import MAX_ANSWER, NotTaken, Undelivered
from hpo.alerts.message import Message
from trainer.runtime.lifeline import die_with

TIMEOUT = 10.0  # seconds for a server to answer, or to accept the next part of a message
COMMAND_TIMEOUT = 30.0  # seconds


def send(target: str, message: Message) -> None:
    """Sends to a target of `rules.Rule`. Raises Undelivered."""
    kind, _, rest = target.partition(":")
    if kind == "webhook":
        _webhook(_secret(rest), rest, message)
    elif kind == "command":
        _command(rest, message)
    elif kind == "mail":
        by_apprise.mail(rest.split(","), message)
    else:
        by_apprise.chat(_secret(rest), message)


def _secret(where: str) -> str:
    """Returns the content of `@FILE`, or of the variable in `env:NAME`."""
    if where.startswith("@"):
        try:
            secret = Path(where[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise Undelivered(f"its file {where[1:]} cannot be read ({reason})") from None
    else:
        secret = os.environ.get(where.removeprefix("env:"), "").strip()
    if not secret:
        raise Undelivered(f"{where.removeprefix('@')} holds nothing")
    return secret


# Webhooks


def _webhook(url: str, where: str, message: Message) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise Undelivered(f"{where.removeprefix('@')} holds no http or https URL")
    headers = {"Content-Type": "application/json", "User-Agent": "hpo", "Idempotency-Key": message.id}
    _post(urllib.request.Request(url, json.dumps(dict(message.content)).encode(), headers, method="POST"))


class _Stay(urllib.request.HTTPRedirectHandler):
    """Refuses redirections: a redirected POST would become a GET."""

    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
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
    except (OSError, ValueError) as error:  # an answer that is cut off or not HTTP
        raise Undelivered(_reason(error)) from None
    except Exception as error:  # http.client's own errors share no narrower base
        raise Undelivered(f"it gives no answer in HTTP ({type(error).__name__})") from None


def _refused(error: urllib.error.HTTPError) -> Undelivered:
    with suppress(Exception):
        answer = " ".join(error.read(MAX_ANSWER).decode(errors="replace").split())
        if answer:
            return _kind_of(error, f": {answer}")
    return _kind_of(error, "")


def _kind_of(error: urllib.error.HTTPError, said: str) -> Undelivered:
    why = f"it answers {error.code}{said}"
    if error.code in (400, 413, 422):
        return NotTaken(why)
    if 300 <= error.code < 400:
        why += ", and a redirection is not followed: give the new address"
    return Undelivered(why, _seconds(error.headers.get("Retry-After", "")))


def _seconds(text: str) -> float | None:
    """Returns the seconds of a Retry-After header, which holds seconds or a date; None if it is neither."""
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


# A command


def _command(line: str, message: Message) -> None:
    """Runs the user's program with the event as JSON on standard input.

    The program has a process group of its own, which is killed after `COMMAND_TIMEOUT` seconds or with this process.
    """
    environ = secret_environment.without(os.environ)
    environ |= {"HPO_ALERT_ID": message.id, "HPO_ALERT_EVENT": message.content["event"]}
    parent = os.getpid()
    with tempfile.TemporaryFile() as event, tempfile.TemporaryFile() as errors:
        event.write(json.dumps(message.content).encode())
        event.seek(0)
        try:
            process = subprocess.Popen(
                shlex.split(line),
                stdin=event,
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
                os.killpg(process.pid, signal.SIGKILL)  # its child processes, too
            process.wait()
        if process.returncode:
            errors.seek(0)
            output = " ".join(errors.read().decode(errors="replace").split())[-MAX_ANSWER:]
            raise Undelivered(f"it ends with {process.returncode}{f': {output}' if output else ''}")
