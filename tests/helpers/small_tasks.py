"""Small tasks of three bundled studies, and the single steps of a fit of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from trainer_runs import MemoryReporter

from studies.convnet.config import Config as ConvnetConfig
from studies.convnet.task import ConvnetTask
from studies.gpt.config import Config as GptConfig
from studies.gpt.task import GptTask
from studies.mlp.config import Config as MlpConfig
from studies.mlp.task import MlpTask
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.loop import Fit, fit
from trainer.task import Task

NAMES = ("mlp", "convnet", "gpt")
_CONVNET = {"data": {"pictures": {"num_train": 60, "size": 8}}}
_GPT = {
    "data": {"corpus": {"general": 120, "target": 60}},
    "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
}


def small(name: str, **train: Any) -> tuple[Task, TrainConfig]:
    """Returns the task of a bundled study with a small model, which evaluates nothing, and its configuration."""
    kind: Any
    kind, config = {
        "mlp": lambda: (MlpTask, MlpConfig()),
        "convnet": lambda: (ConvnetTask, ConvnetConfig.model_validate(_CONVNET)),
        "gpt": lambda: (GptTask, GptConfig.model_validate(_GPT)),
    }[name]()
    settings = {"num_epochs": 2, "batch_size": 8, "checkpoint": {}, **train}
    config = config.model_copy(update={"train": TrainConfig.model_validate(settings)})
    unjudged = {"evaluate": lambda self, model: {}, "artifacts": lambda self, model: {}}
    return type(f"Unjudged{kind.__name__}", (kind,), unjudged)(config), config.train


def trained(task: Task, config: TrainConfig, directory: Path) -> MemoryReporter:
    reporter = MemoryReporter()
    assert fit(task, config, reporter, CheckpointStore(directory, fence=1)).kind == "complete"
    return reporter


@contextmanager
def around_each_step(context: Callable[[Fit], AbstractContextManager[Any]]) -> Iterator[None]:
    """Runs each optimizer step of any fit inside `context(fit)`."""
    step = Fit._train_window

    def surrounded(self: Fit, batches: list[Any]) -> Any:
        with context(self):
            return step(self, batches)

    with mock.patch.object(Fit, "_train_window", surrounded):
        yield
