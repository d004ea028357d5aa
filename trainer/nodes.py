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
from collections.abc import Callable, Mapping
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


class Server:
    """A node but the first: it starts its ranks of every launch at `address`, until `leaving`.

    Each calls the function `entry` ("package.module:name") with what the first node gives, under `environ`. Where that
    node is gone, its ranks are ended and it is waited for. What it does goes to `say`, a line each.
    """

    def __init__(
        self,
        entry: str,
        address: str,
        environ: Mapping[str, str],
        leaving: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._entry, self._address, self._environ = entry, address, environ
        self._leaving, self._say = leaving, say
        self._seen = ("", 0)  # the last launch: whose, and its number

    def serve(self) -> None:
        host, port = parsed(self._address)
        said = ""
        while not self._leaving():
            try:
                socket.create_connection((host, port), timeout=2.0).close()  # torch would write of each try
                store = dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)
                self._say(said := f"waiting for a trial at {self._address}")
                while not self._leaving():
                    self._look(store)
            except (OSError, dist.DistError):
                if said != (now := f"nobody listens at {self._address}: waiting for the first node"):
                    self._say(said := now)
                time.sleep(1.0)

    def _look(self, store: dist.Store) -> None:
        """Take part in the launch at hand, if it is another than the last one seen."""
        time.sleep(OFTEN)
        if not store.check(["launch"]):
            return
        number = int(store.get("launch"))
        launch = dist.PrefixStore(str(number), store)
        given = json.loads(launch.get("given"))
        if (given["id"], number) == self._seen:
            return
        self._seen = given["id"], number
        if not launch.check(["end"]) and (place := launch.add("came", 1)) < given["nodes"]:
            self._say(f"launch {number}: node {place} of {given['nodes']}")
            self._take_part(launch, place, given | {"entry": self._entry})

    def _take_part(self, launch: dist.Store, place: int, given: dict[str, Any]) -> None:
        from trainer.launch import LocalRanks

        with LocalRanks(given, place, self._environ) as local:
            for rank in local.ranks:
                rank.start()
            while not launch.check(["end"]):
                status = {"host": socket.gethostname(), "at": time.time(), "ranks": local.status()}
                launch.set(f"status/{place}", json.dumps(status))
                if self._leaving() or launch.check(["leave"]):
                    local.page.ask_to_leave()
                time.sleep(OFTEN)
