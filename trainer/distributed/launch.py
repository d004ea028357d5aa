"""Launches the ranks of one trial, on this host or on several nodes, and ends them all when one is lost.

A lost rank ends the attempt, and the caller decides about the next. A rank dies with its launcher. On one host only the
loopback interface is listened on, and nothing is left on disk.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainer.config import ParallelConfig
from trainer.distributed.local_ranks import LOOPBACK, LocalRanks
from trainer.distributed.nodes import Nodes, RemoteRank
from trainer.distributed.watch import Watch
from trainer.errors import ConfigError, OutOfMemory


def launch(
    entry: str,
    job: Mapping[str, Any],
    parallel: ParallelConfig,
    *,
    device: str = "auto",
    environ: Mapping[str, str] | None = None,
    leaving: Callable[[], bool] = lambda: False,
    nodes: Nodes | None = None,
) -> list[Any]:
    """Calls the function `entry` ("package.module:name") with `job` on every rank. Returns their results, by rank.

    `job` and the results are JSON. `leaving` is polled: once it returns True, the ranks' `preempted` is true; an error
    it raises ends the ranks and is raised here. Secrets go through `environ`, which nobody else can read. If a rank
    raises OutOfMemory, all are ended and started again with the smaller micro-batch that it names, down to one sample.
    With `nodes`, each node has as many ranks, and this host the first ones. Raises RankLost, RankFailed, and
    ConfigError if there are fewer GPUs than ranks.
    """
    count = nodes.count if nodes else 1
    if parallel.ranks % count:
        raise ConfigError(
            f"train.parallel asks for {parallel.ranks} ranks, which {count} nodes cannot share evenly: ask for a "
            f"multiple of {count}."
        )
    orders = {"entry": entry, "job": dict(job), "device": _device(device, parallel.ranks // count)}
    orders |= {"micro_batch_size": None, "nodes": count, "world": parallel.ranks, "timeout": parallel.timeout}
    while True:
        try:
            with nodes.launch(orders) if nodes else _on_loopback(orders) as complete:
                return _results(complete, environ or {}, leaving, nodes)
        except OutOfMemory as error:
            orders["micro_batch_size"] = error.micro_batch_size


def _results(
    orders: dict[str, Any], environ: Mapping[str, str], leaving: Callable[[], bool], nodes: Nodes | None
) -> list[Any]:
    with LocalRanks(orders, 0, environ) as local:
        others = nodes.others() if nodes else []
        share = len(local.ranks)
        ranks = [*local.ranks, *(RemoteRank(share * node.index + i, node) for node in others for i in range(share))]

        def look() -> None:
            if leaving() and not local.page.leaving:
                local.page.ask_to_leave()
                if nodes:
                    nodes.ask_to_leave()

        local.start()
        results = Watch(ranks, others, orders["timeout"]).results(look)
        if nodes and (left := [node for node in others if node.leaves]):
            nodes.lost = f"{left[0]} leaves."
        return results


@contextmanager
def _on_loopback(orders: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the orders of ranks that find each other through a store of this process."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        yield {**orders, "host": LOOPBACK, "port": port, "prefix": ""}
        del store


def _device(name: str, ranks: int) -> str:
    """Returns cpu, or cuda if there is a GPU for each of this host's ranks."""
    kind = name.partition(":")[0]
    if kind == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"train.parallel asks for {ranks} ranks here and this machine has {torch.cuda.device_count()} GPUs, "
            "and every rank needs one: ask for fewer, or set train.device=cpu."
        )
    return "cuda"
