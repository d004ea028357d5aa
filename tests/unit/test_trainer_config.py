"""What a configuration refuses, and that each field has a dotted path."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from trainer.config import TrainConfig


def paths(model: BaseModel, prefix: str = "") -> set[str]:
    found = set()
    for name in type(model).model_fields:
        value = getattr(model, name)
        found |= paths(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name}
    return found


def test_the_fields_are_a_surface_that_only_grows():
    """Taking a path away breaks studies and resumption: add to this list, never remove."""
    assert paths(TrainConfig()) >= {
        "num_epochs", "batch_size", "micro_batch_size", "seed", "num_threads", "num_workers", "precision",
        "deterministic", "device", "resume_from", "data_timeout", "data_retry",
        "optim.name", "optim.lr", "optim.weight_decay", "optim.momentum", "optim.nesterov", "optim.betas", "optim.eps",
        "schedule.name", "schedule.warmup", "schedule.warmup_steps", "schedule.warmup_ratio", "schedule.warmup_epochs",
        "schedule.min_lr", "schedule.one_cycle.pct_start", "schedule.one_cycle.div_factor",
        "schedule.one_cycle.final_div_factor", "schedule.plateau.monitor", "schedule.plateau.mode",
        "schedule.plateau.patience", "schedule.plateau.factor", "schedule.plateau.threshold", "schedule.plateau.min_lr",
        "clip.norm", "clip.value",
        "early_stopping.monitor", "early_stopping.mode", "early_stopping.patience", "early_stopping.min_delta",
        "guard.max_consecutive",
        "checkpoint.every_epochs", "checkpoint.every_steps", "checkpoint.keep_last", "checkpoint.keep_best",
        "checkpoint.monitor", "checkpoint.mode",
    }  # fmt: skip


def test_it_survives_json():
    config = TrainConfig.model_validate({"optim": {"betas": [0.9, 0.99]}, "resume_from": "/a/b"})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "given",
    [
        {"num_epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 1.0},
        {"precision": "fp64"},
        {"device": "cuda:x"},
        {"seed": -1},
        {"optim": {"lr": 0}},
        {"optim": {"lr": float("inf")}},
        {"optim": {"betas": [0.9, 1.0]}},
        {"optim": {"name": "adamW"}},
        {"clip": {"norm": 0}},
        {"schedule": {"plateau": {"factor": 1.0}}},
        {"schedule": {"warmup_ratio": 1.5}},
        {"guard": {"max_consecutive": 0}},
        {"checkpoint": {"keep_last": 0}},
    ],
)
def test_refused(given):
    with pytest.raises(ValidationError):
        TrainConfig.model_validate(given)


def test_contradictions_are_one_sentence():
    with pytest.raises(ValidationError, match="warmup_steps and warmup_ratio both set the length of the warmup"):
        TrainConfig.model_validate({"schedule": {"warmup_steps": 1, "warmup_ratio": 0.1}})
    with pytest.raises(ValidationError, match="nesterov is true but momentum is 0"):
        TrainConfig.model_validate({"optim": {"name": "sgd", "nesterov": True, "momentum": 0}})
