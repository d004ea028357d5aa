"""What a configuration refuses, and that each field has a dotted path."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from trainer.config import OptimConfig, TrainConfig
from trainer.config.optim import LookaheadConfig


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
        "deterministic", "device", "resume_from", "data_timeout", "data_retry", "validate_data",
        "optim.name", "optim.lr", "optim.weight_decay", "optim.momentum", "optim.nesterov", "optim.betas", "optim.eps",
        "optim.beta1", "optim.beta2", "optim.trust_coefficient", "optim.gamma", "optim.update_every", "optim.max_dim",
        "optim.beta2_decay", "optim.clip_threshold", "optim.ns_steps", "optim.adamw", "optim.options",
        "optim.layer_decay", "optim.groups", "optim.implementation", "optim.wrap", "optim.lookahead.k",
        "optim.lookahead.alpha", "optim.sam.rho", "optim.sam.adaptive",
        "schedule.name", "schedule.warmup", "schedule.warmup_steps", "schedule.warmup_ratio", "schedule.warmup_epochs",
        "schedule.min_lr", "schedule.one_cycle.pct_start", "schedule.one_cycle.div_factor",
        "schedule.one_cycle.final_div_factor", "schedule.plateau.monitor", "schedule.plateau.mode",
        "schedule.plateau.patience", "schedule.plateau.factor", "schedule.plateau.threshold", "schedule.plateau.min_lr",
        "schedule.warmup_power", "schedule.warmup_start", "schedule.scale_lr", "schedule.base_batch_size",
        "schedule.power", "schedule.gamma", "schedule.step_size", "schedule.milestones", "schedule.num_cycles",
        "schedule.cycle_mult", "schedule.cycle_mode", "schedule.timescale", "schedule.decay_ratio",
        "schedule.decay_shape", "schedule.options",
        "clip.norm", "clip.value", "clip.per_parameter", "clip.adaptive", "clip.adaptive_eps", "clip.adaptive_exclude",
        "gradients.centralize", "gradients.normalize", "gradients.noise", "gradients.noise_decay",
        "gradients.noise_scale", "gradients.penalty", "gradients.penalty_norm", "gradients.penalty_of",
        "early_stopping.monitor", "early_stopping.mode", "early_stopping.patience", "early_stopping.min_delta",
        "early_stopping.divergence",
        "guard.max_consecutive",
        "checkpoint.every_epochs", "checkpoint.every_steps", "checkpoint.keep_last", "checkpoint.keep_best",
        "checkpoint.keep_every",
        "checkpoint.max_bytes", "checkpoint.monitor", "checkpoint.mode",
        "peak_tflops", "activations.checkpoint", "activations.modules", "batch_growth.epochs", "batch_growth.factor",
        "memory_limit", "init.name", "init.gain", "init.std", "init.zero_last",
        "optim.d0", "optim.d_coef", "gradients.conflicts", "gradients.balance", "gradients.balance_alpha",
        "gradients.balance_lr", "gradients.balance_of", "schedule.one_cycle.momentum",
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
        {"checkpoint": {"keep_every": 2}, "folds": 2},
    ],
)
def test_refused(given):
    with pytest.raises(ValidationError):
        TrainConfig.model_validate(given)


def test_contradictions_are_one_sentence():
    with pytest.raises(ValidationError, match=r"divergence=10.0 is read only with early_stopping\.monitor: set"):
        TrainConfig.model_validate({"early_stopping": {"divergence": 10.0}})
    with pytest.raises(ValidationError, match="warmup_steps and warmup_ratio both set the length of the warmup"):
        TrainConfig.model_validate({"schedule": {"warmup_steps": 1, "warmup_ratio": 0.1}})


@pytest.mark.parametrize(("given", "named"), [({"compile": True}, "compile"), ({"precision": "fp8"}, "precision=fp8")])
def test_sophia_is_refused_beside_what_has_no_second_derivative(given, named):
    with pytest.raises(ValidationError, match=f"do not go with {named}: choose adamw or lion, or leave"):
        TrainConfig.model_validate(given | {"optim": {"name": "sophia"}})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "sgd", "nesterov": True, "momentum": 0}, "nesterov is true but momentum is 0: set momentum above 0"),
        ({"momentum": 0.9}, "momentum is set, and adamw has none: its own are lr, weight_decay, betas, eps"),
        ({"name": "lion", "eps": 1e-8}, "eps is set, and lion has none: its own are lr, weight_decay, betas;"),
        ({"name": "sgd", "beta2": 0.9}, "beta2 is set, and sgd has none"),
        ({"betas": [0.9, 0.99], "beta1": 0.8}, "betas sets beta1 and beta2 as well"),
        ({"options": {"rank": 4}}, r"options\.rank is set, and adamw has none"),
        ({"name": "muon", "options": {"eps": 1e-6}}, r"muon has a field for it: set train\.optim\.eps instead"),
        (
            {"name": "lion", "implementation": "fused"},
            "'fused' does not exist for lion: give auto or foreach or single",
        ),
        ({"name": "adan"}, "choose one of 'sgd', .* or one of your own by its path, as in 'my_module:MyOptimizer'"),
        ({"name": "my_module:My", "implementation": "fused"}, "is for the optimizers of the table: leave it auto"),
        ({"name": "my module:My"}, "choose one of"),
    ],
)
def test_what_an_optimizer_does_not_know_is_refused(given, sentence):
    with pytest.raises(ValidationError, match=sentence):
        OptimConfig.model_validate(given)


def test_hyperparameters_are_the_optimizers_defaults_and_what_is_set():
    assert OptimConfig().hyperparameters == {"lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
    changed = OptimConfig(name="lion", lr=1.0, beta2=0.5).hyperparameters
    assert changed == {"lr": 1.0, "weight_decay": 0.03, "betas": (0.9, 0.5)}
    own = OptimConfig(name="my_module:My", momentum=0.5, options={"rank": 4}).hyperparameters
    assert own == {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.5, "rank": 4}


def test_lookahead_is_there_where_it_is_asked_for_and_in_ranger():
    assert OptimConfig().lookahead_k is None
    assert OptimConfig(wrap="lookahead").lookahead_k == 5
    assert OptimConfig(name="ranger").lookahead_k == 6
    assert OptimConfig(name="ranger", wrap="sam", lookahead=LookaheadConfig(k=3)).lookahead_k == 3


def test_a_field_added_later_is_no_part_of_the_json_at_its_default():
    """So a begun study keeps its configuration's hash, and a release before the field reads what this one writes."""
    written = TrainConfig().model_dump(mode="json")
    assert not {"d0", "d_coef"} & written["optim"].keys() and "balance" not in written["gradients"]
    optim = OptimConfig(name="prodigy", lr=1.0, d0=1e-5)
    assert optim.model_dump(mode="json")["d0"] == 1e-5
    for config in (TrainConfig(), TrainConfig(optim=optim)):
        assert TrainConfig.model_validate_json(config.model_dump_json()) == config
