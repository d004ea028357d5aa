"""Answers GET requests on a port of a process, beside what the process does."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from hpo.errors import UserError

LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>[A-Za-z0-9_.-]+):)?(?P<port>\d{1,5})")


class Answer(NamedTuple):
    """The answer to a request: its status, its body, and the type of a body that is not empty."""

    status: int
    body: bytes = b""
    content: str = ""


Answerer = Callable[[str, Mapping[str, str]], Answer]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Answerer) -> None:
        self.answer = answer
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 5.0  # seconds in which a request has to come

    def do_GET(self) -> None:
        headers = {name.lower(): text for name, text in self.headers.items()}
        status, body, content = self.server.answer(self.path, headers)
        self.send_response_only(status)
        if content:
            self.send_header("Content-Type", content)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Writes no log: an orchestrator asks every few seconds."""


@contextmanager
def answered(field: str, address: str | None, answer: Answerer) -> Iterator[None]:
    """Answers on `[HOST:]PORT`, of this host's loopback by default, within the block; not at all without an address.

    `answer` gets the path and the headers, by their names in lower case. Raises UserError, which names the option
    `field`, if the address cannot be used.
    """
    if address is None:
        yield
        return
    with _opened(field, address, answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name=field, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def _opened(field: str, address: str, answer: Answerer) -> _Server:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise UserError(field=field, value=repr(address), fix="give PORT or HOST:PORT")
    try:
        return _Server((match["host"] or LOOPBACK, int(match["port"])), answer)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(field=field, value=address, why=f"it cannot be used ({why})", fix="give another") from error
