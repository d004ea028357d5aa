"""Starts a host's share of a trial's ranks, reports their status and ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from trainer.distributed.member import Page
from trainer.runtime.threads import ONE

LOOPBACK = "127.0.0.1"


class LocalRank:
    """A rank's process; its last message arrives in an unnamed file."""

    def __init__(self, number: int, orders: Mapping[str, Any], environ: Mapping[str, str], page: Page) -> None:
        self.number, self._orders, self._environ, self._page = number, orders, environ, page
        self._process: subprocess.Popen[bytes] | None = None
        self._word: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`

    def start(self) -> None:
        environ = os.environ | ONE
        if self._orders["host"] == LOOPBACK:
            environ |= {"GLOO_SOCKET_IFNAME": _loopback(), "NCCL_SOCKET_IFNAME": _loopback()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.distributed.rank"],
            stdin=subprocess.PIPE,
            env=environ | dict(self._environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(self._orders["page"], self._word.fileno()),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        orders = json.dumps({**self._orders, "rank": self.number, "word": self._word.fileno()})
        with self._process.stdin as pipe:
            pipe.write(orders.encode())

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """Returns the exit code as subprocess does: None while the rank runs, negative if a signal ended it."""
        return self._process.poll() if self._process else None

    @property
    def stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat[stat.rindex(b")") + 2 :][:1] in (b"T", b"t")

    @property
    def beats(self) -> int:
        return self._page.beats()[self.number]

    def word(self) -> dict[str, Any]:
        """Returns the rank's last message; an empty dict while it runs or if it left none."""
        if self.code is None:
            return {}
        descriptor = self._word.fileno()  # read in place: the rank writes at the same offset
        return json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0) or b"{}")

    def end(self) -> None:
        """Ends the rank and every process that it has started; a rank leads its session."""
        if self._process is not None and self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._word.close()

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.pid})"


class LocalRanks:
    """The ranks of a launch that run on this host, node `index`; they end with the context."""

    def __init__(self, orders: Mapping[str, Any], index: int, environ: Mapping[str, str]) -> None:
        self._shared = tempfile.TemporaryFile()  # noqa: SIM115, closed at the end
        self.page = Page(self._shared.fileno(), orders["world"])
        share = orders["world"] // orders["nodes"]
        orders = {**orders, "path": sys.path, "page": self._shared.fileno(), "parent": os.getpid(), "share": share}
        self.ranks = [LocalRank(share * index + i, orders, environ, self.page) for i in range(share)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.end()
        self._shared.close()

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()

    def status(self) -> dict[int, dict[str, Any]]:
        """Returns the status of each rank, which `trainer.distributed.nodes.RemoteRank` shows on the first node."""
        shown = ("pid", "code", "stopped", "beats")
        return {
            rank.number: {name: getattr(rank, name) for name in shown} | {"word": rank.word()} for rank in self.ranks
        }


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"
