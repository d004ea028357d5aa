"""Builds a study's task for a single process, for the finders, `hpo plan` and `hpo diagnose`."""

from __future__ import annotations

from typing import Any

from hpo.declaration.study import Study
from hpo.errors import UserError
from trainer.config import ParallelConfig, TrainConfig


def for_one_process(config: Any) -> Any:
    """Returns the configuration for training in one process."""
    if not isinstance(getattr(config, "train", None), TrainConfig):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": ParallelConfig()})})


def stepped(study: Study, config: object, why: str) -> Any:
    """Returns the study's task under a configuration. Raises UserError, with `why`, if it trains in its own loop."""
    if study.trains_itself:
        raise UserError(f"study {study.name!r} trains in a loop of its own, {why}.")
    return study.task_class()(config)
