"""Turns a configuration into one that a single process trains, for the finders and `hpo diagnose`."""

from __future__ import annotations

from typing import Any

from trainer.config import ParallelConfig, TrainConfig


def alone(config: Any) -> Any:
    """The same, trained by one process."""
    if not isinstance(getattr(config, "train", None), TrainConfig):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": ParallelConfig()})})
