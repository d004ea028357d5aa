"""A trial's ranks on several hosts: the first node launches and judges all of them, each other one starts its share.

They meet at a TCPStore that the first node's launcher opens, for one launch after the other:

    launch              the number n of the last launch
    n/given             what its ranks are to do
    n/came              how many nodes have come for it; the k-th has place k
    n/status/k          what node k says of its ranks, several times a second; its silence is its loss
    n/leave, n/end      that all are to save and leave; that the launch is over

Neither this store nor torch's process groups know who speaks to them: the address must be one of a network that is
trusted.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.errors import ConfigError

SILENT = 30.0  # seconds without a word after which a node counts as lost
OFTEN = 0.2  # seconds between two words, and two looks
PATIENCE = timedelta(seconds=SILENT)  # of anybody who asks the store


class Meeting:
    """The first node's end of where `count` nodes meet; `address` is "host:port", by which all of them reach it."""

    def __init__(self, count: int, address: str) -> None:
        self.count, (self._host, self._port) = count, parsed(address)
        self._launches, self._id = 0, os.urandom(8).hex()
        try:
            family = socket.getaddrinfo(self._host, self._port)[0][0]
            listener = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(
                f"{address} cannot be listened at: {error.strerror}. Give an address of this host, and a port that "
                "nothing else listens at."
            ) from error
        self._store = dist.TCPStore(
            self._host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=PATIENCE,
        )

    def at(self) -> dict[str, Any]:
        """Where the ranks of the next launch find each other."""
        return {"host": self._host, "port": self._port, "prefix": f"{self._launches + 1}/ranks", "id": self._id}

    def begin(self, given: Mapping[str, Any]) -> dist.Store:
        """Call the nodes to a launch; what is said of it."""
        self._launches += 1
        store = dist.PrefixStore(str(self._launches), self._store)
        store.set("given", json.dumps(given))
        self._store.set("launch", str(self._launches))
        return store


class Node:
    """A node but the first, as its words to the first one have it."""

    def __init__(self, place: int, store: dist.Store) -> None:
        self.place, self._store = place, store
        self._heard, self._looked = time.monotonic(), 0.0
        self.status: dict[str, Any] = {}

    def look(self) -> None:
        """Hear what it says, if it is time to."""
        now = time.monotonic()
        if now - self._looked < OFTEN:
            return
        self._looked = now
        if self._store.check([f"status/{self.place}"]):
            status = json.loads(self._store.get(f"status/{self.place}"))
            if status != self.status:
                self.status, self._heard = status, now

    @property
    def unheard(self) -> float:
        """Seconds since its last word; 0 before it has come."""
        return time.monotonic() - self._heard if self.status else 0.0

    def __str__(self) -> str:
        return f"node {self.place} ({self.status['host']})" if self.status else f"node {self.place}, which has not come"


class RemoteRank:
    """A rank of such a node, for the launcher like one of its own."""

    def __init__(self, number: int, node: Node) -> None:
        self.number, self._node = number, node

    def _said(self, name: str, otherwise: Any) -> Any:
        return self._node.status.get("ranks", {}).get(str(self.number), {}).get(name, otherwise)

    def start(self) -> int:
        return 0  # its node does

    @property
    def pid(self) -> int:
        return self._said("pid", 0)

    @property
    def code(self) -> int | None:
        return self._said("code", None)

    @property
    def stopped(self) -> bool:
        return self._said("stopped", False)

    @property
    def beats(self) -> int:
        return self._said("beats", 0)

    def word(self) -> dict[str, Any]:
        return self._said("word", {})

    def kill(self) -> None:
        """Its node does, at the launch's end."""

    def end(self) -> None:
        """The same."""

    def __str__(self) -> str:
        return f"rank {self.number} ({f'pid {self.pid} of ' if self.pid else ''}{self._node})"


def parsed(address: str) -> tuple[str, int]:
    """Host and port; raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} is no address: give the first node's host and a port, as in 'node0:29400'.")
    return host.strip("[]"), int(port)
