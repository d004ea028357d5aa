"""Serves the ranks of other hosts: starts those that a host is asked for."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from trainer.distributed.nodes import OFTEN, PATIENCE, parsed


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
        from trainer.distributed.launch import LocalRanks

        with LocalRanks(given, place, self._environ) as local:
            for rank in local.ranks:
                rank.start()
            while not launch.check(["end"]):
                status = {"host": socket.gethostname(), "at": time.time(), "ranks": local.status()}
                launch.set(f"status/{place}", json.dumps(status))
                if self._leaving() or launch.check(["leave"]):
                    local.page.ask_to_leave()
                time.sleep(OFTEN)
