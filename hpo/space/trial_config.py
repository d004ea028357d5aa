"""Reads from a trial's configuration how it is trained: its last epoch, its lanes and its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config import ParallelConfig
from trainer.report import Json


def last_epoch(config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> float:
    """The epoch at which a trial ends at last; infinity where its configuration does not say. Of a trial that is
    trained several times, for folds or for seeds, each time counts as an epoch.

    `changes`, path -> value, go before the configuration."""
    train: Json = config.get("train")
    train = train if isinstance(train, Mapping) else {}
    if (parts := train.get("folds", 1) * train.get("seeds", 1)) != 1:
        return parts
    found = (changes or {}).get("train.num_epochs", train.get("num_epochs"))
    return found if isinstance(found, int) else math.inf


def parallel_of(config: Mapping[str, Any]) -> ParallelConfig:
    """`train.parallel` of a whole configuration in JSON; its default where there is none."""
    train: Json = config.get("train")
    return ParallelConfig.model_validate(train.get("parallel", {}) if isinstance(train, Mapping) else {})


def lanes_of(config: Mapping[str, Any]) -> int:
    """`train.lanes` of a whole configuration in JSON; 1 where there is none."""
    train: Json = config.get("train")
    return train.get("lanes", 1) if isinstance(train, Mapping) else 1
