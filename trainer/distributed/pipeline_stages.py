"""Divides a model's parts among the stages of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from torch import Tensor, nn

from trainer.compat.modules import buffers_in, modules_in, parameters_in
from trainer.errors import ConfigError
from trainer.task import Task


def stages_of(model: nn.Module, task: Task, stages: int) -> list[list[nn.Module]]:
    """Returns the parts that the task's plan names by stage, in order, cut so that the largest stage is smallest.

    Size is the number of parameters. Raises ConfigError for a plan that cannot be followed.
    """
    parts, name = list(task.pipeline_plan(model)), f"{type(task).__name__}.pipeline_plan"
    advice = f"train.parallel asks for {stages} stages"
    if not parts:
        raise ConfigError(
            f"{advice}, and {type(task).__name__} has no pipeline_plan(model): write one, or use shard=zero3."
        )
    planned = [p for part in parts for p in part.parameters()]
    if missing := [path for path, p in model.named_parameters() if not any(p is other for other in planned)]:
        raise ConfigError(f"{name} leaves out the parameter {missing[0]!r}: put it into one of the parts.")
    blocks = _blocks(parts)
    if len(blocks) < stages:
        raise ConfigError(f"{advice}, and {name} has {len(blocks)} parts that are trained: give one to each stage.")
    divided = divide([[*parameters_of(block)] for block in blocks], stages)
    by_stage = [[part for block in blocks[run] for part in block] for run in divided]
    owners = [{*parameters_of(stage)} for stage in by_stage]
    if shared := [path for path, p in model.named_parameters() if sum(p in owner for owner in owners) > 1]:
        raise ConfigError(f"{shared[0]!r} is a parameter of two stages: tie no weights across them, or set pipeline=1.")
    return by_stage


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Run(nn.Sequential):
    """Parts run one after the other; the first takes all arguments, and a tuple becomes the next one's arguments."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output: Any = inputs
        for part in self:
            output, kwargs = part(*as_tuple(output), **kwargs), {}
        return output

    def owners(self) -> list[nn.Module]:
        """Returns the parts that have parameters and share none of them."""
        sets = {part: parameters_of([part]) for part in self}
        return [
            p for p, params in sets.items() if params and all(params.isdisjoint(sets[q]) for q in sets if q is not p)
        ]


def _blocks(parts: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Returns each trained part with the untrained ones after it; those before the first go with the first."""
    blocks: list[list[nn.Module]] = [[]]
    has_trainable = False
    for part in parts:
        learns = any(p.requires_grad for p in part.parameters())
        if learns and has_trainable:
            blocks.append([])
        blocks[-1].append(part)
        has_trainable |= learns
    return blocks if has_trainable else []


def divide(blocks: Sequence[Sequence[Tensor]], stages: int) -> list[slice]:
    """Returns the slices that cut a sequence into `stages` runs, so that the largest has the fewest elements."""
    sizes = [sum(p.numel() for p in block) for block in blocks]

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(sizes[start:]), (len(sizes),)
        ways = []
        for stop in range(start + 1, len(sizes) - left + 2):
            largest, stops = best(stop, left - 1)
            ways.append((max(sum(sizes[start:stop]), largest), (stop, *stops)))
        return min(ways)

    stops = best(0, stages)[1]
    return [slice(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]


def parameters_of(parts: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {p for part in parts for p in part.parameters()}


def skeleton(model: nn.Module) -> nn.Module:
    """Returns the same model on the meta device, with shapes only."""
    meta: dict[int, Tensor] = {id(b): b.to("meta") for b in model.buffers()}
    meta |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return deepcopy(model, meta)  # what is in the memo is not copied


def keep(model: nn.Module, mine: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
    """Drops from `model` the modules and tensors of `others` that are not in `mine`; all names stay as they are."""
    foreign = {*_modules(others)} - {*_modules(mine)}
    kept = {id(t) for t in _tensors(mine)}
    dropped = {id(t) for t in _tensors(others)} - kept
    for module in [*model.modules()]:
        modules_in(module).update({name: nn.Identity() for name, m in modules_in(module).items() if m in foreign})
        for tensors in (parameters_in(module), buffers_in(module)):
            tensors.update({name: None for name, t in tensors.items() if id(t) in dropped})


def _modules(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return itertools.chain.from_iterable(part.modules() for part in parts)


def _tensors(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    return itertools.chain.from_iterable((*part.parameters(), *part.buffers()) for part in parts)
