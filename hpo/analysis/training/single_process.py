"""Makes the task of a study for a single process, for the finders, `hpo plan` and `hpo diagnose`."""

from __future__ import annotations

from typing import Any

from hpo.declaration.study import Study
from hpo.errors import UserError
from trainer.config import ParallelConfig, TrainConfig


def alone(config: Any) -> Any:
    """The same, trained by one process."""
    if not isinstance(getattr(config, "train", None), TrainConfig):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": ParallelConfig()})})


def stepped(study: Study, config: Any, why: str) -> Any:
    """The study's task under a configuration. Raises UserError, with `why`, where it trains in a loop of its own."""
    if study.trains_itself:
        raise UserError(f"study {study.name!r} trains in a loop of its own, {why}.")
    return study.task_class()(config)
