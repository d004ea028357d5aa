"""Configures the dpo study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from studies._lm.config import DataConfig, ModelConfig
from studies._lm.pairs import preferences
from studies._lm.records import Record, check_inputs, read_records
from trainer.config import CheckpointConfig, Frozen, OptimConfig, Positive, ScheduleConfig, TrainConfig
from trainer.errors import DataError

FIELDS = ("prompt", "chosen", "rejected")  # fields of a record
KTO_LEAST = 8  # samples of a micro-batch


class LossConfig(Frozen):
    """The loss. `dpo`, `ipo` and `kto` align the model itself (trainer.losses.preference).

    `reward` trains a model that scores answers, -log sigmoid(r(chosen) - r(rejected)) (Bradley & Terry 1952; Stiennon
    et al. 2020, arXiv 2009.01325).
    """

    name: Literal["dpo", "ipo", "kto", "reward"] = "dpo"
    beta: Positive = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    @model_validator(mode="after")
    def _smoothing_is_dpos(self) -> LossConfig:
        if self.label_smoothing and self.name != "dpo":
            raise ValueError(f"label_smoothing is read only by dpo: leave it out with name={self.name}.")
        return self


class EvalConfig(Frozen):
    """Evaluation: the first `prompts` held-back prompts get answers of at most `max_new_tokens`; best of `best_of`.

    Held-back pairs are judged by rewards of `beta` times the log-ratio, the same for every loss, so that trials
    compare. A policy that is further than `most_kl` nats from its reference is infeasible: it may still tell pairs
    apart well when its answers have long become worthless (Rafailov et al. 2024, arXiv 2406.02900).
    """

    prompts: Annotated[int, Field(ge=1)] = 64
    max_new_tokens: Annotated[int, Field(ge=1)] = 8
    best_of: Annotated[int, Field(ge=2)] = 16
    beta: Positive = 0.1
    most_kl: Positive = 5.0  # on the generated data a policy of only best answers is 4 log 2 = 2.8 nats away


TRAIN = TrainConfig(
    num_epochs=4,
    batch_size=16,
    optim=OptimConfig(lr=2e-3, weight_decay=0.0),
    schedule=ScheduleConfig(name="cosine", warmup_ratio=0.1),
    checkpoint=CheckpointConfig(monitor="val/loss", mode="min"),
)


class Config(Frozen):
    """The whole configuration of the study. A sample is a prompt with a chosen and a rejected answer."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig(base_dropout=0.0)  # so that a fresh policy is its reference
    loss: LossConfig = LossConfig()
    evaluation: EvalConfig = EvalConfig()
    train: TrainConfig = TRAIN

    @model_validator(mode="after")
    def _kto_sees_enough(self) -> Config:
        """Refuses micro-batches that are too small for KTO.

        Its reference point is a mean over a micro-batch, clamped at 0: with few answers it is biased upwards.
        """
        size = 1 if self.train.micro_batch_size == "auto" else self.train.micro_batch_size
        size = size or self.train.batch_size // self.train.parallel.data
        if self.loss.name == "kto" and size < KTO_LEAST:
            raise ValueError(
                f"loss.name=kto estimates its reference point in each micro-batch, of which a rank has {size} here or "
                f"may have: set train.micro_batch_size to {KTO_LEAST} or more, or loss.name to dpo or ipo."
            )
        return self


def check(config: Config) -> None:
    """Refuses bad inputs before a study is written: see `check_inputs`."""
    check_inputs(config.model, config.data, records)


def records(data: DataConfig) -> list[Record]:
    """Returns the user's preferences, or generated ones. Raises DataError for one that prefers an answer to itself."""
    if not data.path:
        return preferences(data.generated, data.seed)
    preferred = read_records(data, FIELDS)
    for number, record in enumerate(preferred, 1):
        if (answer := record["chosen"]) == record["rejected"]:
            raise DataError(
                f"data.path={str(data.path)!r}, record {number}: chosen and rejected are both {answer[:40]!r}, which "
                "prefers nothing: leave it out."
            )
    return preferred
