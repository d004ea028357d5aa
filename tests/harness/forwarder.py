"""Forwards TCP connections, and delays what passes: a process beside those that it slows.

    python forwarder.py ADDRESS HOST:PORT...

It prints the port on which it listens at ADDRESS for each server, and reads `DELAY JITTER` from standard input, the
seconds that each piece waits, in each direction, and those that are added at random. It ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time


class Forwarder:
    """Starts a forwarder at `address` for `servers`, each `HOST:PORT`; `ports` has the port of each."""

    def __init__(self, address: str, *servers: str) -> None:
        words = [sys.executable, __file__, address, *servers]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.ports = [int(word) for word in self._process.stdout.readline().split()]

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """Holds all that passes from now on for so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds} {jitter}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate(timeout=30)


class _Delay:
    seconds, jitter = 0.0, 0.0


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Writes what is read when its time has come, in the order in which it was read."""
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

    async def write() -> None:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if not data:
                return
            writer.write(data)
            await writer.drain()

    async def read() -> None:
        data = b" "
        while data:
            try:
                data = await reader.read(1 << 16)
            except OSError:
                data = b""  # an end has broken the connection, and so both have
            await pieces.put((time.monotonic() + _Delay.seconds + random.random() * _Delay.jitter, data))

    reading = asyncio.create_task(read())
    try:
        await write()
    except OSError:
        return
    finally:
        reading.cancel()
        writer.close()


async def _connect(server: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = server.rpartition(":")
    try:
        there, back = await asyncio.open_connection(host, int(port))
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pass(reader, back), _pass(there, writer), return_exceptions=True)


async def _serve(address: str, servers: list[str]) -> None:
    ports = []
    for server in servers:
        listening = await asyncio.start_server(lambda *ends, server=server: _connect(server, *ends), address, 0)
        ports.append(str(listening.sockets[0].getsockname()[1]))
    print(*ports, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        _Delay.seconds, _Delay.jitter = map(float, line.split())
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2:]))
