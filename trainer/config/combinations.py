"""Refuses a `TrainConfig` with incompatible fields, in a sentence that names them and the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trainer.config.idle import idle_fields
from trainer.config.optim import OPTIMIZERS

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.config.parallel import ParallelConfig


def check(config: TrainConfig) -> None:
    """Raises ValueError for the first combination that cannot be trained."""
    for rule in _RULES:
        rule(config)


def _nothing_is_ignored(config: TrainConfig) -> None:
    if sentences := idle_fields(config, "refused"):
        raise ValueError(sentences[0])


def _weights_have_one_average(config: TrainConfig) -> None:
    if config.optim.averages and config.average.name != "none":
        raise ValueError(
            f"average.name is {config.average.name!r}, and optim.name={config.optim.name} averages the weights itself: "
            "leave average out, or choose adamw."
        )


def _momentum_can_be_cycled(config: TrainConfig) -> None:
    optim, cycled = config.optim, "schedule.one_cycle.momentum"
    if not config.schedule.cycles_momentum:
        return
    changeable = [name for name, known in OPTIMIZERS.items() if known.momentum]
    if optim.name not in changeable:
        raise ValueError(
            f"{cycled} sets the momentum of each step, and optim.name={optim.name} has none that can change: choose "
            f"one of {', '.join(changeable)}, or leave {cycled} out."
        )
    if name := next((name for name in ("momentum", "betas", "beta1") if getattr(optim, name) is not None), None):
        instead = " and set optim.beta2 for the second of betas" if name == "betas" else ""
        raise ValueError(f"optim.{name} is set, and {cycled} sets it at each step: leave optim.{name} out{instead}.")


def _noise_is_measurable(config: TrainConfig) -> None:
    if config.gradients.noise_scale and (config.fixed_micro_batch_size or config.batch_size) >= config.batch_size:
        raise ValueError(
            "gradients.noise_scale compares the micro-batches of a window: "
            f"set micro_batch_size below batch_size={config.batch_size}, to a quarter of it for example."
        )


def _folds_are_possible(config: TrainConfig) -> None:
    if config.folds > 1 and config.seeds > 1:
        raise ValueError(
            f"folds={config.folds} and seeds={config.seeds}: a trial repeats by one of them, so leave one."
        )
    parts = "folds" if config.folds > 1 else "seeds"
    if config.parts > 1 and config.parallel.ranks > 1:
        raise ValueError(f"{parts} are trained by one process: leave parallel out, or {parts}=1.")
    if config.parts > 1 and config.checkpoint.keep_every is not None:
        raise ValueError(
            f"checkpoint.keep_every counts epochs, which each of the {parts} begins anew: leave it out, or set "
            f"{parts}=1."
        )


def _lanes_do_the_same(config: TrainConfig) -> None:
    if config.fixed_lanes > 1 and (conflict := _no_lanes(config)):
        raise ValueError(
            f"lanes is {config.lanes}: trials that train as lanes of one model cannot do with {conflict}; "
            f"leave {conflict.partition('=')[0].partition(',')[0]} out, or lanes=1."
        )


def _parts_are_differentiated_one_by_one(config: TrainConfig) -> None:
    """Refuses rules that compare the gradients of a loss's parts with settings that know the whole gradient alone."""
    others = {
        "compile": bool(config.compile),
        "parallel, where the gradients of other ranks are missing": config.parallel.ranks > 1,
        f"activations.checkpoint={config.activations.checkpoint}": config.activations.checkpoint != "none",
        f"activations.offload={config.activations.offload}": config.activations.offload != "none",
        "gradients.penalty, which is added to the parts": config.gradients.penalty is not None,
        "gradients.noise_scale, which measures whole gradients": config.gradients.noise_scale,
        "memory_limit, by an estimate that knows one gradient": config.memory_limit is not None,
        "micro_batch_size=auto, by an estimate that knows one gradient": config.micro_batch_size == "auto",
    }
    if config.gradients.by_parts and (conflict := _first(others)):
        rule = "conflicts=pcgrad" if config.gradients.conflicts != "none" else "balance=gradnorm"
        raise ValueError(
            f"gradients.{rule} takes the gradient of each part of the loss, which does not go with {conflict}: "
            "leave one of them out."
        )


def _penalty_is_differentiable(config: TrainConfig) -> None:
    """Refuses a penalty with settings that cannot give the second derivatives it needs."""
    others = {
        "compile": bool(config.compile),
        f"precision={config.precision}": config.precision in ("fp16", "fp8"),
        "optim.name=sophia": config.optim.name == "sophia",
        "parallel.shard, tensor and pipeline": config.parallel.parts or config.parallel.pipeline > 1,
    }
    if config.gradients.penalty is not None and (conflict := _first(others)):
        raise ValueError(
            f"gradients.penalty takes second derivatives, which do not go with {conflict}: leave one of them out."
        )


def _sophia_is_differentiable(config: TrainConfig) -> None:
    conflict = _first({"compile": bool(config.compile), "precision=fp8": config.precision == "fp8"})
    if config.optim.name == "sophia" and conflict:
        raise ValueError(
            f"optim.name=sophia takes second derivatives, which do not go with {conflict}: choose adamw or lion, or "
            f"leave {conflict.partition('=')[0]} out."
        )


def _what_is_recomputed_is_differentiated_once(config: TrainConfig) -> None:
    others = {
        "compile, which chooses by itself what it computes twice": bool(config.compile),
        "optim.name=sophia, which differentiates twice": config.optim.name == "sophia",
        "gradients.penalty, which differentiates twice": config.gradients.penalty is not None,
    }
    for name in ("checkpoint", "offload"):
        if getattr(config.activations, name) != "none" and (conflict := _first(others)):
            raise ValueError(f"activations.{name} does not go with {conflict}: leave one of them out.")


_OF_ALL = {  # optimizers whose step is of all parameters
    "sophia": "differentiates through all parameters at once",
    "schedule_free": "is evaluated at an average of all parameters",
    "prodigy": "estimates one distance from all parameters",
}


def _optimizer_has_what_it_steps_on(config: TrainConfig) -> None:
    parallel, optim = config.parallel, config.optim
    known = OPTIMIZERS.get(optim.name)
    if parallel.parts and known is not None and not known.sharded:
        others = ", ".join(name for name, other in OPTIMIZERS.items() if other.sharded)
        raise ValueError(
            f"optim.name is {optim.name!r}, which needs whole parameters, and parallel gives each rank parts of "
            f"them: choose one of {others}, or use shard=none or zero1, tensor=1 and expert=1."
        )
    if parallel.parts and (optim.name, optim.implementation) == ("sgd", "fused"):  # torch 2.13 has no rule for it
        raise ValueError("optim.implementation is 'fused', which sgd has for whole parameters alone: leave it auto.")
    if optim.name in _OF_ALL and (parallel.pipeline > 1 or parallel.shard == "zero1"):
        divider = "parallel.shard=zero1" if parallel.shard == "zero1" else f"parallel.pipeline={parallel.pipeline}"
        raise ValueError(
            f"optim.name is {optim.name!r}, which {_OF_ALL[optim.name]}, and {divider} divides them: choose adamw or "
            f"lion, or leave {divider.split('=')[0]} out."
        )


def _ranks_have_work(config: TrainConfig) -> None:
    if config.batch_size < config.parallel.data:
        raise ValueError(
            f"batch_size is {config.batch_size} and parallel.data is {config.parallel.data}: give every rank at least "
            "one sample of a batch."
        )
    unknown = config.parallel.pipeline > 1 or config.parallel.offload
    if unknown and (config.memory_limit is not None or config.micro_batch_size == "auto"):
        raise ValueError(
            "memory_limit and micro_batch_size=auto go by an estimate, and there is none of a pipeline's stages, "
            "nor of what is not offloaded: leave them out, or parallel.pipeline and parallel.offload."
        )
    if config.parallel.ranks > 1 and config.gradients.noise_scale:
        raise ValueError("gradients.noise_scale is measured by one process: leave it out, or train.parallel.")
    if config.parallel.gather == "bf16" and config.precision != "bf16":
        raise ValueError(
            f"parallel.gather=bf16 gives layers weights in bf16, and precision is {config.precision}: set it to "
            "bf16, or leave parallel.gather out."
        )
    if config.compile and config.parallel.ranks > 1:
        _check_compiled(config, config.parallel)
    if config.parallel.compression == "powersgd" and config.optim.wrap == "sam":
        raise ValueError("parallel.compression=powersgd keeps what one pass has left out, and SAM takes two: use fp16.")
    if config.parallel.parts and (wholes := _whole(config, "lookahead", "sam")):
        raise ValueError(
            f"{_need(wholes)} whole parameters, and parallel gives each rank parts of them: "
            "leave that out, or use shard=none or zero1, tensor=1 and expert=1."
        )
    if config.parallel.pipeline > 1:
        _check_pipeline(config, config.parallel.pipeline)


def _check_compiled(config: TrainConfig, parallel: ParallelConfig) -> None:
    if config.compile == "graphs":
        raise ValueError(
            f"compile=graphs records what one process launches, and parallel has {parallel.ranks}: set compile to "
            "true, or leave parallel out."
        )
    if parallel.parts or parallel.pipeline > 1:
        raise ValueError(
            "compile is for one process and for replicas of whole models: leave it out, or set parallel.shard to "
            "none or zero1, and tensor, pipeline and expert to 1."
        )
    if parallel.static_graph or parallel.find_unused or parallel.bucket_mb < 1:
        raise ValueError(
            "compile cuts the model where parallel's buckets end, of which torch's first has 1 MB: set bucket_mb "
            "to 1 or more, and leave static_graph and find_unused out."
        )


def _check_pipeline(config: TrainConfig, stages: int) -> None:
    if config.freeze.patterns:
        raise ValueError(
            "freeze.patterns are names of the whole model, and parallel.pipeline gives each rank a stage of it: leave "
            "one of them out."
        )
    if wholes := _whole(config, "lookahead"):
        raise ValueError(
            f"{_need(wholes)} the whole model, and parallel.pipeline gives each rank a stage of it: "
            "leave that out, or use data or shard in place of pipeline."
        )
    share = -(-config.batch_size // config.parallel.data)
    micro = config.micro_batch_size if isinstance(config.micro_batch_size, int) else share
    if -(-share // micro) < stages:
        raise ValueError(
            f"parallel.pipeline is {stages} and a rank's {share} samples of a batch are fewer than {stages} "
            f"micro-batches, so stages would only wait: set micro_batch_size to {max(share // stages, 1)} or less, "
            "or raise batch_size."
        )


def _first(others: Mapping[str, bool]) -> str | None:
    """Returns the first name whose condition is True."""
    return next((name for name, holds in others.items() if holds), None)


def _need(names: list[str]) -> str:
    return f"{' and '.join(names)} {'need' if len(names) > 1 else 'needs'}"


def _whole(config: TrainConfig, *wraps: str) -> list[str]:
    """Returns the settings that need whole parameters or a whole model.

    These are number formats that rescale, copies of all the weights, and these wrappers.
    """
    holds = {
        f"precision={config.precision}": config.precision in ("fp16", "fp8"),
        f"gradients.noise={config.gradients.noise}": bool(config.gradients.noise),
        "optim.name=ranger": config.optim.name == "ranger",
        f"optim.wrap={config.optim.wrap}": config.optim.wrap in wraps,
        f"average.name={config.average.name}": config.average.name != "none",
    }
    return [name for name, is_set in holds.items() if is_set]


def _no_lanes(c: TrainConfig) -> str | None:
    """Returns the first setting that lanes cannot train with, as `field=value`; None if there is none."""
    refused = {
        f"parallel, {c.parallel.ranks} ranks": c.parallel.ranks > 1,
        f"folds={c.folds}": c.folds > 1,
        f"seeds={c.seeds}": c.seeds > 1,
        f"compile={'graphs' if c.compile == 'graphs' else 'true'}": bool(c.compile),
        f"precision={c.precision}": c.precision in ("fp16", "fp8"),
        f"num_workers={c.num_workers}": c.num_workers not in (0, "none"),
        f"num_threads={c.num_threads}": c.num_threads > 1,  # where threads meet depends on the number of lanes
        "batch_growth": bool(c.batch_growth.epochs),
        "schedule.one_cycle.momentum": c.schedule.cycles_momentum,
        f"micro_batch_size={c.micro_batch_size}": c.micro_batch_size == "auto",
        "memory_limit": c.memory_limit is not None,
        f"optim.name={c.optim.name}": c.optim.name == "sophia",
        f"optim.wrap={c.optim.wrap}": c.optim.wrap == "sam",
        f"activations.checkpoint={c.activations.checkpoint}": c.activations.checkpoint != "none",
        f"activations.offload={c.activations.offload}": c.activations.offload != "none",
        "gradients.penalty": c.gradients.penalty is not None,
        f"gradients.conflicts={c.gradients.conflicts}": c.gradients.conflicts != "none",
        f"gradients.balance={c.gradients.balance}": c.gradients.balance != "none",
        "gradients.noise_scale": c.gradients.noise_scale,
        "freeze.patterns": bool(c.freeze.patterns),
        "rollback.enabled": c.rollback.enabled,
        "checkpoint.asynchronous": c.checkpoint.asynchronous,
    }
    return next((name for name, is_set in refused.items() if is_set), None)


_RULES: tuple[Callable[[TrainConfig], None], ...] = (
    _nothing_is_ignored,
    _weights_have_one_average,
    _momentum_can_be_cycled,
    _noise_is_measurable,
    _folds_are_possible,
    _lanes_do_the_same,
    _parts_are_differentiated_one_by_one,
    _penalty_is_differentiable,
    _sophia_is_differentiable,
    _what_is_recomputed_is_differentiated_once,
    _optimizer_has_what_it_steps_on,
    _ranks_have_work,
)
