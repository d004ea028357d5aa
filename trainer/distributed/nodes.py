"""Connects the nodes that share each trial's ranks, through the store of torchrun's rendezvous.

torchrun starts one process on each node. The first node launches and judges all ranks; each other node starts its share
(`trainer.distributed.follow`). They exchange two kinds of keys:

    wanted     the first node's order: a launch with its id, nothing, or that the others leave
    node/k     node k's report on its ranks, several times a second; its silence counts as its loss

Neither this store nor torch's process groups authenticate their peers: the rendezvous belongs in a trusted network.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainer.distributed.failures import NodeLost
from trainer.errors import ConfigError

STARTING = 180.0  # seconds that a node, or a rank, has to import everything and report
SILENT = 30.0  # seconds of silence after which a node counts as lost
OFTEN = 0.2  # seconds between two reports, and between two reads
_PATIENCE = timedelta(seconds=SILENT)  # timeout of a request to the store
# Variables that torchrun sets in each process that it starts. A trial's ranks are numbered separately.
_TOLD = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)


class Nodes:
    """This process's view as node `index` of `count`; the nodes meet at the store at `host` and `port`.

    `lost` says why the nodes cannot go on together, if they cannot: this process must then fail, so that torchrun
    starts a new rendezvous.
    """

    def __init__(self, index: int, count: int, host: str, port: int, store: dist.Store) -> None:
        self.index, self.count, self.host, self.port = index, count, host, port
        self.lost = ""
        self._store = store
        self._launch: dict[str, Any] = {}
        self._store.set_timeout(_PATIENCE)
        if index == 0:
            self._want({})  # replaces an earlier process's order

    @classmethod
    def of_torchrun(cls, environ: MutableMapping[str, str] = os.environ) -> Nodes:
        """Meets the other nodes through torchrun's variables, and takes the variables out of `environ`.

        Raises ConfigError if torchrun has started several processes on this node.
        """
        if (processes := environ["LOCAL_WORLD_SIZE"]) != "1":
            raise ConfigError(
                f"torchrun has started {processes} processes on this node: give --nproc-per-node=1, since each node "
                "starts the ranks of a trial itself."
            )
        store, index, count = next(rendezvous("env://", timeout=timedelta(seconds=STARTING)))
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        for name in _TOLD:
            environ.pop(name, None)
        if "GLOO_SOCKET_IFNAME" not in environ and (name := _interface(_facing(store, index, host, port))):
            environ["GLOO_SOCKET_IFNAME"] = name
        return cls(index, count, host, port, store)

    @contextmanager
    def launch(self, orders: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Makes each other node start its share of the ranks within the block. Yields the orders for the ranks."""
        number = os.urandom(8).hex()
        orders = {**orders, "host": self.host, "port": self.port, "prefix": f"ranks/{number}"}
        try:
            self._want({"id": number, "orders": orders, "leave": False})
            yield orders
        except NodeLost as lost:
            self.lost = str(lost)
            raise
        finally:
            with suppress(NodeLost):  # without the store the others end by themselves
                self._want({})

    def others(self) -> list[Node]:
        """Returns the other nodes whose reports the first node reads during its launch."""
        return [Node(index, self) for index in range(1, self.count)]

    def ask_to_leave(self) -> None:
        """Makes the ranks of all nodes save and leave."""
        self._want(self._launch | {"leave": True})

    def dismiss(self) -> None:
        """Makes the other nodes end for good, and waits until they have read the order: the store may end with this
        process."""
        self._want({"over": True})
        others, deadline = range(1, self.count), time.monotonic() + SILENT
        while not all(self.read(f"node/{index}").get("over") for index in others) and time.monotonic() < deadline:
            time.sleep(OFTEN)

    def wanted(self) -> dict[str, Any]:
        """Returns the first node's order; an empty dict before there is one. Raises NodeLost."""
        return self.read("wanted")

    def say(self, words: Mapping[str, Any]) -> None:
        """Sends this node's report to the first node. Raises NodeLost."""
        self._write(f"node/{self.index}", {**words, "at": time.time()})

    def read(self, key: str) -> dict[str, Any]:
        """Returns the value of a key; an empty dict if it was never written. Raises NodeLost."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else {}
        except dist.DistError as error:
            raise self._unreachable() from error

    @property
    def launched(self) -> str | None:
        """Returns the id of the launch that the first node wants."""
        return self._launch.get("id")

    def _want(self, wanted: dict[str, Any]) -> None:
        self._launch = wanted
        self._write("wanted", wanted)

    def _write(self, key: str, words: Mapping[str, Any]) -> None:
        try:
            self._store.set(key, json.dumps(words))
        except dist.DistError as error:
            raise self._unreachable() from error

    def _unreachable(self) -> NodeLost:
        self.lost = f"torchrun's store at {self.host}:{self.port} does not answer."
        return NodeLost(self.lost)


def _facing(store: dist.Store, index: int, host: str, port: int) -> str:
    """Returns the address at which the other nodes reach this one.

    By itself gloo takes the address of the host's own name, which is a loopback one wherever /etc/hosts says so.
    """
    if index > 0:
        address = _source(host, port)
        store.set(f"address/{index}", address)
        return address
    return _source(store.get("address/1").decode(), port)  # the store's own name may be a loopback one here, too


def _source(host: str, port: int) -> str:
    """Returns the address from which this host sends to another. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)
        return route.getsockname()[0]


def _interface(address: str) -> str | None:
    """Returns the name of the network interface with this address."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == address for a in addresses)), None)


class Node:
    """Another node, whose reports the first node reads during a launch."""

    def __init__(self, index: int, nodes: Nodes) -> None:
        self.index, self._nodes = index, nodes
        self._last = nodes.read(f"node/{index}")  # from before this launch, perhaps by a process that has ended
        self._heard, self._looked = time.monotonic(), 0.0
        self.status: dict[str, Any] = {}

    def look(self) -> None:
        """Reads the node's report if it is due. Raises NodeLost."""
        now = time.monotonic()
        if now - self._looked < OFTEN:
            return
        self._looked = now
        words = self._nodes.read(f"node/{self.index}")
        if words != self._last:
            self._last, self._heard = words, now
            self.status = words if words.get("id") == self._nodes.launched else self.status

    @property
    def unheard(self) -> float:
        """Returns the seconds since its last report, or since the launch."""
        return time.monotonic() - self._heard

    @property
    def silent(self) -> bool:
        """Returns True once the node counts as lost."""
        return self.unheard > (SILENT if self.status else STARTING)

    @property
    def leaves(self) -> bool:
        """Returns True if the node was asked to leave."""
        return self.status.get("leaves", False)

    def __str__(self) -> str:
        return f"node {self.index} ({self.status['host']})" if self.status else f"node {self.index}, which has not come"


class RemoteRank:
    """A rank on another node, with the interface of a rank on this host."""

    def __init__(self, number: int, node: Node) -> None:
        self.number, self._node = number, node

    def _said(self, name: str, otherwise: Any) -> Any:
        return self._node.status.get("ranks", {}).get(str(self.number), {}).get(name, otherwise)

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

    def __str__(self) -> str:
        return f"rank {self.number} ({f'pid {self.pid} of ' if self.pid else ''}{self._node})"
