"""Starts a node's share of the ranks of each trial that another node launches."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from trainer.distributed.local_ranks import LocalRanks
from trainer.distributed.nodes import OFTEN, Nodes


def follow(
    nodes: Nodes,
    entry: str,
    environ: Mapping[str, str],
    leaving: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Starts this node's share of each launch's ranks until the first node dismisses it, or `leaving` returns True.

    Each rank calls the function `entry` ("package.module:name") with the first node's job, under `environ`. `say(line)`
    is called for each thing this node does. Raises NodeLost if torchrun's store is gone.
    """
    say(f"node {nodes.index} of {nodes.count}: waiting for a trial")
    while not leaving():
        wanted = nodes.wanted()
        if wanted.get("over"):
            nodes.say({"over": True})
            return
        if "orders" in wanted:
            say(f"node {nodes.index} of {nodes.count}: launch {wanted['id']}")
            _take_part(nodes, wanted["id"], {**wanted["orders"], "entry": entry}, environ, leaving)
        else:
            nodes.say({})
            time.sleep(OFTEN)


def _take_part(
    nodes: Nodes,
    launch: str,
    orders: Mapping[str, object],
    environ: Mapping[str, str],
    leaving: Callable[[], bool],
) -> None:
    with LocalRanks(orders, nodes.index, environ) as local:
        local.start()
        while (wanted := nodes.wanted()).get("id") == launch:
            leaves = leaving()
            if leaves or wanted["leave"]:
                local.page.ask_to_leave()
            status = {"id": launch, "host": socket.gethostname(), "leaves": leaves, "ranks": local.status()}
            nodes.say(status)
            time.sleep(OFTEN)
