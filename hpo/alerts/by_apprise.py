"""Sends a message through Apprise, which reaches chats, mail servers and a hundred other services by their URLs.

Apprise reports whether a message was accepted, and logs the reason if it was not. The dispatcher decides when a message
is sent and when it is sent again. The message's id is passed along if the service has a field for it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit

from hpo.alerts.delivery_errors import MAX_ANSWER, Undelivered
from hpo.alerts.message import Message
from trainer.redaction import HIDDEN, redacted

SMTP = "HPO_SMTP"
_PLAIN = "smtp+plain"
_PORTS = {"smtps": 465, "smtp": 587, _PLAIN: 25}
_MODES = {"smtps": "ssl", "smtp": "starttls", _PLAIN: "insecure"}


def chat(url: str, message: Message) -> None:
    """Sends to an Apprise URL, or to the webhook address of Slack or Discord. Raises Undelivered.

    A text with `@everyone` or `<!channel>` notifies nobody: an invisible space separates the sign from the name.
    """
    title, text = (words.replace("@", "@\u200b").replace("<!", "<\u200b!") for words in (message.title, message.text))
    _notify(url, title, text)


def mail(addresses: Sequence[str], message: Message) -> None:
    """Sends a mail to each address through the server in HPO_SMTP. Raises Undelivered."""
    server = _smtp_server()
    user = unquote(server.username or "")
    host = socket.getfqdn() if "." in socket.getfqdn() else "localhost"
    sender = parse_qs(server.query).get("from", [user if "@" in user else f"hpo@{host}"])[0]
    login = f"{quote(user, safe='')}:{quote(unquote(server.password or ''), safe='')}@" if user else ""
    words = {"from": sender, "smtp": server.hostname, "mode": _MODES[server.scheme], "to": ",".join(addresses)}
    words |= {"format": "text", "+Idempotency-Key": message.id, "verify": "yes"}
    scheme = "mailto" if server.scheme == _PLAIN else "mailtos"
    port = server.port or _PORTS[server.scheme]
    url = f"{scheme}://{login}{server.hostname}:{port}?{urlencode(words)}"
    _notify(url, " ".join(f"[hpo] {message.title}".split()), message.text)


def _notify(url: str, title: str, text: str) -> None:
    if importlib.util.find_spec("apprise") is None:
        raise Undelivered("it needs Apprise: pip install 'hpo[apprise]'")
    from apprise import Apprise, AppriseAsset, NotifyFormat, OverflowMode

    with _reasons() as reasons:
        plain = AppriseAsset(app_id="hpo", async_mode=False, image_url_mask=None, image_url_logo=None)
        service = Apprise.instantiate(url, asset=plain)
        if service is None:
            raise Undelivered("its address is none that Apprise knows")
        service.overflow_mode = OverflowMode.TRUNCATE
        if service.notify(body=text or title, title=title if text else "", body_format=NotifyFormat.TEXT):
            return
    why = " ".join(redacted(" ".join(reasons)).replace(url, HIDDEN).split())[:MAX_ANSWER]
    raise Undelivered(f"Apprise could not send it{f' ({why})' if why else ''}")


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Yields the list of Apprise's warnings in this thread; other threads may send at the same time."""
    lines, thread = list[str](), threading.get_ident()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                lines.append(record.getMessage())

    handler, logger = Lines(logging.WARNING), logging.getLogger("apprise")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _smtp_server() -> SplitResult:
    """Returns the server in HPO_SMTP: smtps:// is TLS from the start, smtp:// STARTTLS, smtp+plain:// unencrypted."""
    url = os.environ.get(SMTP, "").strip()
    fix = "give smtps://HOST, or smtp://HOST for STARTTLS, with user and password before the host"
    try:
        parts = urlsplit(url)
        port = parts.port or 0
    except ValueError:
        parts, port = urlsplit(""), -1
    if parts.scheme not in _PORTS or not parts.hostname or port < 0:
        raise Undelivered(f"{SMTP} {'is not set' if not url else 'names no mail server'}: {fix}")
    if parts.scheme == _PLAIN and parts.username:
        raise Undelivered(f"{SMTP} would send a password in the clear: {fix}")
    return parts
