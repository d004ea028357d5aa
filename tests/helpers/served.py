"""The live pages of a home, served by a thread of this process."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpo.analysis.serve.server import Server, bound
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.tracking.ui.gate import token_of

HOST = "127.0.0.1"


@contextmanager
def served(home: Home, port: int = 0, storage: str = "", **how: Any) -> Iterator[Server]:
    """A server that answers; it ends with the block."""
    ledger = Ledger(storage or home.storage, create=False, read_only=True)
    with bound(HOST, port, ()) as opened:
        server = Server(ledger, home, opened, **how)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
    ledger.close()


def port_of(server: Server) -> int:
    return int(re.findall(r":(\d+)/", server.address)[0])


def get(port: int, path: str, home: Home | None = None, method: str = "GET", **headers: str) -> Any:
    """Returns status, headers and text of an answer; brings the token of `home` if there is one."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    bearer = {"Authorization": f"Bearer {token_of(home)}"} if home else {}
    connection.request(method, path, headers=bearer | {name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
