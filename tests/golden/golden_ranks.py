"""How two processes train a model together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from golden_hash import plain
from golden_task import Tiny, trail, trained
from torch import nn

from trainer.config import ParallelConfig


class Dropping(Tiny):
    """With dropout, which each rank draws for itself."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"clip": {"norm": None}, "batch_size": 9},
    {"parallel": {"data": 2, "shard": "zero3"}},
)


def ranks() -> Any:
    """Returns how a training goes on each of two ranks, of whole copies of the model and of parts."""
    from trainer.distributed.launch import launch

    return launch(f"{__name__}:rank", {}, ParallelConfig(data=2), device="cpu")


def rank(job: Mapping[str, Any]) -> Any:
    """Trains as one of the ranks."""
    return [_trained({"parallel": {"data": 2}} | way) for way in WAYS]


def _trained(way: Mapping[str, Any]) -> Any:
    course = trail(trained(lambda: Dropping(None), **way))
    parts = course["weights"]
    weights = {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in parts.items()}
    return plain(course | {"weights": weights})
