"""Servers that take alerts, or behave as servers do that take none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Answer = tuple[int, dict[str, str]]
TAKEN: Answer = (200, {})


class Got(NamedTuple):
    """A request as it came."""

    path: str
    id: str
    body: dict[str, Any]


class Receiver:
    """Keeps what it gets; `answer` says what it answers to the n-th request, from 0."""

    def __init__(self, answer: Callable[[int], Answer]) -> None:
        self.got: list[Got] = []
        self.answer = answer
        self.url = ""

    @property
    def ids(self) -> list[str]:
        return [got.id for got in self.got]


@contextmanager
def receiver(answer: Callable[[int], Answer] = lambda n: TAKEN) -> Iterator[Receiver]:
    """A webhook on this host."""
    kept, lock = Receiver(answer), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(kept.got)
                kept.got.append(Got(self.path, self.headers["Idempotency-Key"], body))
            code, headers = kept.answer(number)
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"no" if code >= 300 else b"ok")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_port}/hook/of-mine"
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silent() -> Iterator[str]:
    """The URL of a server that accepts and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


def refusing() -> str:
    """The URL of a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"
