"""Every field of `TrainConfig`, away from its default, changes a run, is refused or told of, or is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from trainer_runs import Toy, Trial

from trainer.config import TrainConfig
from trainer.config.idle import TABLE, UNSEEN, leaves, unread
from trainer.errors import ConfigError
from trainer.task import Loss

# A value of each field away from its default, of a run that would show it.
PROBES: dict[str, Any] = {
    "num_epochs": 3, "folds": 2, "seeds": 2, "batch_size": 8, "drop_last": True, "batch_growth.epochs": (1,),
    "batch_growth.factor": 3.0,
    "micro_batch_size": 4, "memory_limit": 1000, "seed": 1, "num_threads": 2, "num_workers": 1, "prefetch": 5,
    "data_timeout": 1.0, "validate_data": True, "data_retry": True, "precision": "bf16", "deterministic": False,
    "compile": True, "device": "cuda", "resume_from": "/nonexistent", "peak_tflops": 1.0,
    "activations.checkpoint": "full", "activations.modules": ("0",), "activations.offload": "cpu",
    "init.name": "orthogonal", "init.gain": 2.0, "init.std": 0.1, "init.zero_last": True,
    "optim.name": "lion", "optim.lr": 0.1, "optim.weight_decay": 0.3, "optim.momentum": 0.5, "optim.nesterov": True,
    "optim.betas": (0.8, 0.9), "optim.beta1": 0.5, "optim.beta2": 0.5, "optim.eps": 0.1,
    "optim.trust_coefficient": 0.1, "optim.d0": 0.1, "optim.d_coef": 0.1,
    "optim.gamma": 0.1, "optim.update_every": 2, "optim.max_dim": 8,
    "optim.beta2_decay": -0.5, "optim.clip_threshold": 2.0, "optim.ns_steps": 2, "optim.adamw": ("0",),
    "optim.options": {"rank": 1}, "optim.layer_decay": 0.5, "optim.groups": ({"pattern": "0.*", "lr_scale": 0.1},),
    "optim.implementation": "single", "optim.wrap": "sam", "optim.lookahead.k": 2, "optim.lookahead.alpha": 0.1,
    "optim.sam.rho": 0.5, "optim.sam.adaptive": True,
    "schedule.name": "cosine", "schedule.warmup": "cosine", "schedule.warmup_steps": 4, "schedule.warmup_ratio": 0.5,
    "schedule.warmup_epochs": 1.0, "schedule.warmup_power": 3.0, "schedule.warmup_start": 0.1,
    "schedule.scale_lr": "linear", "schedule.base_batch_size": 4, "schedule.min_lr": 0.01, "schedule.power": 2.0,
    "schedule.gamma": 0.5, "schedule.step_size": 1.0, "schedule.milestones": (1.0,), "schedule.num_cycles": 2,
    "schedule.cycle_mult": 3.0, "schedule.cycle_mode": "triangular2", "schedule.timescale": 3.0,
    "schedule.decay_ratio": 0.5, "schedule.decay_shape": "linear", "schedule.options": {"rank": 1.0},
    "schedule.one_cycle.pct_start": 0.5, "schedule.one_cycle.div_factor": 2.0,
    "schedule.one_cycle.final_div_factor": 2.0, "schedule.one_cycle.momentum": (0.5, 0.6),
    "schedule.plateau.monitor": "val/loss",
    "schedule.plateau.mode": "max", "schedule.plateau.patience": 0, "schedule.plateau.factor": 0.1,
    "schedule.plateau.threshold": 0.5, "schedule.plateau.min_lr": 0.1,
    "clip.per_parameter": 0.01, "clip.adaptive": 0.01, "clip.adaptive_eps": 0.1, "clip.adaptive_exclude": ("0.*",),
    "clip.norm": 0.01, "clip.value": 0.01,
    "gradients.centralize": True, "gradients.normalize": "global", "gradients.noise": 1.0,
    "gradients.noise_decay": 0.1, "gradients.conflicts": "pcgrad", "gradients.balance": "gradnorm",
    "gradients.balance_alpha": 0.5, "gradients.balance_lr": 0.5, "gradients.balance_of": ("0.*",),
    "gradients.noise_scale": True, "gradients.penalty": 1.0,
    "gradients.penalty_norm": 2.0, "gradients.penalty_of": "loss",
    "freeze.patterns": ("0.*",), "freeze.until": 0.5,
    "loss_scale.init": 2.0, "loss_scale.dynamic": False, "loss_scale.growth_interval": 2,
    "average.name": "ema", "average.decay": 0.5, "average.start": 0.1, "average.every_steps": 3,
    "early_stopping.monitor": "train/lr", "early_stopping.mode": "max", "early_stopping.patience": 1,
    "early_stopping.min_delta": 10.0, "early_stopping.divergence": 0.01, "guard.max_consecutive": 1,
    "rollback.enabled": True, "rollback.threshold": 0.1, "rollback.window": 20, "rollback.min_history": 2,
    "rollback.lr_factor": 0.1, "rollback.cooldown": 2, "rollback.max_rollbacks": 1,
    "checkpoint.every_epochs": None, "checkpoint.every_steps": 1, "checkpoint.asynchronous": True,
    "checkpoint.keep_last": 1, "checkpoint.keep_best": 2, "checkpoint.keep_every": 1, "checkpoint.max_bytes": 1,
    "checkpoint.monitor": "val/loss", "checkpoint.mode": "max",
    "parallel.nproc": 2, "parallel.data": 2, "parallel.tensor": 2, "parallel.pipeline": 2,
    "parallel.schedule": "gpipe", "parallel.stages_per_rank": 3, "parallel.shard": "zero2", "parallel.offload": True,
    "parallel.gather": "bf16", "parallel.bucket_mb": 1.0, "parallel.static_graph": True, "parallel.find_unused": True,
    "parallel.compression": "fp16", "parallel.powersgd_rank": 3, "parallel.sync_batchnorm": True,
    "parallel.context": 2, "parallel.expert": 2, "parallel.timeout": 5.0, "lanes": 4,
}  # fmt: skip


class OneBadStep(Toy):
    """Its fifth loss is NaN, which a guard of 1 shows."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return loss.times(torch.nan) if self.step == 4 else loss


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def record(directory: Path, change: dict[str, Any]) -> tuple[Any, ...]:
    """Whatever a run leaves: its end, values, weights, checkpoints, and events but for those of what is not read."""
    trial = Trial(directory, OneBadStep)
    # Twelve epochs, since the default patience is ten; the learning rate never improves.
    trial.config = TrainConfig.model_validate({"num_epochs": 12, "batch_size": 12} | change)
    outcome = trial.attempt()
    events = [(kind, fields) for kind, fields in trial.reporter.events if kind != "unread_options"]
    return outcome, trial.digest(), repr(events), [(kept.step, kept.epoch) for kept in trial.reporter.committed]


def told(directory: Path, change: dict[str, Any]) -> str:
    trial = Trial(directory)
    trial.config = TrainConfig.model_validate({"num_epochs": 1, "batch_size": 12} | change)
    trial.attempt()
    return " ".join(fields["reason"] for kind, fields in trial.reporter.events if kind == "unread_options")


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    return record(tmp_path_factory.mktemp("default"), {})


def test_every_field_is_probed():
    assert [path for path, _, _ in leaves(TrainConfig())] == list(PROBES)


def test_whatever_is_listed_is_a_field():
    known = set(PROBES)
    switches = {switch.path for row in TABLE for switch in row.switches}
    fields = {field for row in TABLE for field in row.fields}
    assert switches | set(UNSEEN) <= known
    assert all(any(path == field or path.startswith(field) for path in known) for field in fields)


@pytest.mark.parametrize("path", PROBES)
def test_a_field_away_from_its_default_is_not_ignored_in_silence(path, default, tmp_path):
    change = nested(path, PROBES[path])
    if path in UNSEEN:
        assert UNSEEN[path]
        return
    try:
        seen = record(tmp_path, change) != default
    except (ValidationError, ConfigError) as refused:
        assert path.rpartition(".")[2] in str(refused) or path.partition(".")[0] in str(refused)
        return
    named = f"train.{path}=" in unread(TrainConfig.model_validate({"batch_size": 12} | change))
    assert seen != named, "said not to be read, and it is" if seen else "nobody says that it does nothing"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"early_stopping": {"patience": 3}}, "early_stopping.patience=3 is read only with early_stopping.monitor"),
        ({"early_stopping": {"min_delta": 0.1}}, "min_delta=0.1 is read only with early_stopping.monitor: set"),
        ({"early_stopping": {"mode": "max"}}, "early_stopping.mode='max' is read only with early_stopping.monitor"),
        ({"checkpoint": {"mode": "max"}}, "checkpoint.mode='max' is read only with checkpoint.monitor"),
        ({"checkpoint": {"keep_best": 3}}, "checkpoint.keep_best=3 is read only with checkpoint.monitor"),
        (
            {"schedule": {"warmup": "cosine"}},
            "schedule.warmup='cosine' is read only with schedule.warmup_ratio or schedule.warmup_steps or "
            "schedule.warmup_epochs: set one of these, or leave schedule.warmup out",
        ),
        ({"schedule": {"warmup": "polynomial", "warmup_power": 3}}, "schedule.warmup='polynomial' is read only with"),
    ],
)  # fmt: skip
def test_what_no_configuration_can_mean_is_refused(given, sentence):
    with pytest.raises(ValidationError) as error:
        TrainConfig.model_validate(given)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"early_stopping": {"monitor": "val/loss", "patience": 3, "min_delta": 0.1, "mode": "max", "divergence": 9.0}},
        {"checkpoint": {"monitor": "val/loss", "keep_best": 3, "mode": "max"}},
        {"schedule": {"warmup": "polynomial", "warmup_power": 3.0, "warmup_ratio": 0.0}},  # which a space may draw
        {"precision": "fp16", "loss_scale": {"init": 2.0, "growth_interval": 5}},
        {"num_workers": "auto", "prefetch": 4, "data_retry": True},
        {"num_workers": 1, "prefetch": 4},
        {"parallel": {"data": 2, "compression": "powersgd", "powersgd_rank": 4, "bucket_mb": 1.0}},
        {"parallel": {"nproc": 2, "timeout": 5.0, "sync_batchnorm": True}},
        {"average": {"name": "ema", "decay": 0.5}, "optim": {"name": "ranger", "lookahead": {"k": 3}}},
        {"batch_size": 8, "micro_batch_size": 8},
        {"batch_size": 8, "micro_batch_size": 32, "batch_growth": {"epochs": [1], "factor": 4}},
    ],
)
def test_what_is_read_is_not_told_of(given):
    assert unread(TrainConfig.model_validate(given)) == ""


def test_a_micro_batch_larger_than_the_batch_is_told_of(tmp_path):
    assert told(tmp_path / "fits", {"batch_size": 8, "micro_batch_size": 8}) == ""
    said = told(tmp_path / "larger", {"batch_size": 8, "micro_batch_size": 9})
    assert "train.micro_batch_size=9 is more than the 8 samples" in said


def test_the_default_of_a_part_is_that_of_its_fields():
    """A part's defaults are what `leaves` compares with."""
    parts = [value for _, value in TrainConfig() if isinstance(value, BaseModel)]
    assert all(part == type(part)() for part in parts)
