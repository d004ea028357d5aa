"""Configures the lora study. Torch-free."""

from __future__ import annotations

from studies._lm.config import DataConfig, ModelConfig
from studies._lm.records import Record, check_inputs, read_records
from studies._lm.words import instructions
from trainer.config import CheckpointConfig, Frozen, NonNegative, OptimConfig, Positive, ScheduleConfig, TrainConfig

FIELDS = ("prompt", "response")  # fields of a record


class LossConfig(Frozen):
    """Cross-entropy of the responses' tokens, plus `contrastive` times the contrastive loss of `task.contrast`."""

    contrastive: NonNegative = 0.0
    temperature: Positive = 0.1


TRAIN = TrainConfig(
    num_epochs=8,
    batch_size=16,
    optim=OptimConfig(lr=2e-3, weight_decay=0.0),
    schedule=ScheduleConfig(name="cosine", warmup_ratio=0.1),
    checkpoint=CheckpointConfig(monitor="val/loss"),
)


class Config(Frozen):
    """The whole configuration of the study. A sample is a prompt with its response."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TRAIN


def check(config: Config) -> None:
    """Refuses bad inputs before a study is written: see `check_inputs`."""
    check_inputs(config.model, config.data, records)


def records(data: DataConfig) -> list[Record]:
    """Returns the user's records, or generated ones."""
    return read_records(data, FIELDS) if data.path else instructions(data.generated, data.seed)
