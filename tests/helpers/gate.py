"""A gate in front of a server: connections go through while it is open, and break when it shuts."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Gate:
    """Forwards connections to HOST:PORT from a port of its own; while it is shut, it closes each connection at once."""

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("http://").partition(":")
        self._server, self._is_open = (host, int(port)), True
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
        self._listening.close()

    def shut(self) -> None:
        with self._lock:
            self._is_open = False
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._connections.clear()

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                if not self._is_open:
                    client.close()
                    continue
                server = socket.create_connection(self._server)
                self._connections += (client, server)
            for pair in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
