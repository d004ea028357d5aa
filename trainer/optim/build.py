"""Builds the optimizer that `train.optim` names over a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.config.optim import OPTIMIZERS, OptimConfig
from trainer.errors import ConfigError
from trainer.optim.groups import param_groups
from trainer.optim.unwrapped_step import without_compiler
from trainer.runtime.dotted import named


def learning_rate(config: OptimConfig) -> float:
    """Returns the peak learning rate: the configured one, else the optimizer's default."""
    return config.hyperparameters["lr"]


def build(config: OptimConfig, model: nn.Module, *, sharded: bool = False) -> Optimizer:
    """Returns the optimizer that `config` names, over the parameters of `model` that require a gradient.

    Each of its `param_groups` has `lr_scale`, its share of the learning rate, besides torch's entries. Raises
    ConfigError as `check` does, and for a user's optimizer that cannot be made.
    """
    groups = param_groups(model, config)
    check(config, model)
    with without_compiler():
        return maker(config, sharded=sharded)(groups)


def maker(config: OptimConfig, *, sharded: bool = False) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """Returns a function that makes the optimizer that `config` names from groups of parameters, unchecked."""
    if config.name in OPTIMIZERS:
        make = named(OPTIMIZERS[config.name].build, "OPTIMIZERS")
        return lambda groups: make(groups, **config.arguments, **_implementation(config, sharded, groups))
    return lambda groups: _users_own(config.name, groups, config.arguments)


def check(config: OptimConfig, model: nn.Module) -> None:
    """Raises ConfigError, which names the alternative, if the optimizer cannot train this model."""
    if config.name == "muon" and not any(group["muon"] for group in param_groups(model, config)):
        raise ConfigError(
            f"train.optim.name is 'muon', and {type(model).__name__} has no hidden matrix for it (a parameter of two "
            f"dimensions, no embedding, matching none of {', '.join(config.hyperparameters['adamw'])}): "
            "choose adamw, or change train.optim.adamw."
        )
    known, trainable = OPTIMIZERS.get(config.name), (pair for pair in model.named_parameters() if pair[1].requires_grad)
    name = next((name for name, p in trainable if p.is_complex()), None)
    if name is None or known is None:
        return
    if not known.takes_complex:
        others = ", ".join(other for other, entry in OPTIMIZERS.items() if entry.takes_complex)
        raise ConfigError(
            f"train.optim.name is {config.name!r}, which takes no complex parameters such as {name!r}: choose one of "
            f"{others}, or train its real and imaginary parts (torch.view_as_real)."
        )
    if config.implementation == "fused":
        raise ConfigError(
            f"train.optim.implementation is 'fused', which takes no complex parameters such as {name!r}: leave it auto."
        )


def _implementation(config: OptimConfig, sharded: bool, groups: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    ways = OPTIMIZERS[config.name].runs_as
    if len(ways) == 1:
        return {}
    unfused = (sharded and config.name == "sgd") or any(p.is_complex() for group in groups for p in group["params"])
    quickest = next(way for way in ways if not (unfused and way == "fused"))
    way = quickest if config.implementation == "auto" else config.implementation
    return {"fused": True} if way == "fused" else {"foreach": way == "foreach"}


def _users_own(path: str, groups: list[dict[str, Any]], hyperparameters: dict[str, Any]) -> Optimizer:
    make = named(path, "train.optim.name")
    try:
        optimizer = make(groups, **hyperparameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train.optim.name={path!r} was not made of its hyperparameters ({error}): let it take "
            f"{', '.join(hyperparameters)}, or change train.optim.options."
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"train.optim.name={path!r} makes a {type(optimizer).__name__}, no optimizer: name a torch.optim.Optimizer."
        )
    return optimizer
