"""Holds the errors of ranks that fail together."""

from __future__ import annotations

from typing import Any

from trainer.errors import TrainerError


class RankLost(TrainerError):
    """Raised when a rank died, was stopped or hung; names the rank, its pid and what happened to it."""


class NodeLost(RankLost):
    """Raised when a node died or fell silent, or when the nodes can no longer reach each other."""


class RankFailed(TrainerError):
    """Raised when the entry raised on a rank; `report` is the rank's report (`trainer.distributed.rank.Failure`)."""

    def __init__(self, rank: int, report: dict[str, Any]) -> None:
        super().__init__(f"rank {rank}: {report['error']}")
        self.rank, self.report = rank, report
