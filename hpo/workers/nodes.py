"""Joins the nodes that torchrun has started into one worker, whose trials have ranks on all of them."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

from hpo.door import step
from hpo.errors import HpoError, UserError
from hpo.terminal import print
from trainer.errors import ConfigError, TrainerError
from trainer.files import outage
from trainer.runtime.lifeline import die_with

if TYPE_CHECKING:
    from trainer.distributed.nodes import Nodes

RANK = "hpo.workers.ranks:rank"  # the function that each rank of a trial calls
# By default torchrun keeps one store for all rounds of its rendezvous, and then gives a node that joins a later round
# nothing of that store (torch 2.13).
TORCHRUN = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
    "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-id=NAME --no-python"
)


def replaced(what: str) -> UserError:
    """Returns the error for an earlier release's way to use several nodes, with its replacement."""
    driver, worker = step("run --workers 0"), step("worker --study NAME --storage URL")
    return UserError(
        f"{what} has given way to torchrun: `{driver}` on one host, and on each node `{TORCHRUN} {worker}`."
    )


def of_torchrun() -> Nodes | None:
    """Returns the nodes that torchrun has started, with this process's index; None on one node, or without torchrun.

    The process dies with torchrun. Raises UserError if torchrun has started several processes on this node.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return None
    die_with(os.getppid())
    from torch.distributed import DistError

    from trainer.distributed.nodes import Nodes

    try:
        return Nodes.of_torchrun()
    except ConfigError as error:
        raise UserError(str(error)) from error
    except DistError as error:
        raise HpoError(f"the nodes that torchrun has started do not meet: {error}") from error


def follow(nodes: Nodes, storage: str) -> int:
    """Starts this node's share of the ranks of each trial that the first node trains. Returns the exit code."""
    from trainer.distributed.follow import follow as start_ranks

    signals: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    environ = {"HPO_STORAGE": storage, **outage.environ()}  # the URL may hold a password
    start_ranks(nodes, RANK, environ, lambda: bool(signals), lambda line: print(line, flush=True))
    return 128 + signals[0] if signals else 0


def check_complete(nodes: Nodes | None) -> None:
    """Raises TrainerError if the nodes cannot go on together, so that this process ends and torchrun restarts all."""
    if nodes is not None and nodes.lost:
        raise TrainerError(f"{nodes.lost.rstrip('.')}: this worker ends, so that torchrun brings the nodes together.")
