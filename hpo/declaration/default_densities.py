"""Chooses the densities of good values that dimensions follow where their declaration leaves it open.

Such a dimension is a field of the trainer's configuration, whose meaning its path tells. DEFAULTS has the densities
that lower the regret on tasks from which they were not computed (docs/performance.md). A study's row keeps their names,
so a study that began without them continues without them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpo.declaration.behaviour import values_of
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.search.samplers.registry import Kind
from hpo.space.densities import densities
from hpo.space.dimension import Dimension
from trainer.config import TrainConfig

DEFAULTS = {("train.optim.lr", "sgd"): "lr/sgd"}  # path and optimizer -> density
LEAST = 0.5  # the share of a density's good values that the range must hold
_OPTIMIZER = "train.optim.name"


def settle(study: Study, spec: StudySpec, begun: StudySpec | None) -> dict[str, str]:
    """Returns, by path, the names of the densities that a study's dimensions follow by default.

    There are none in a list of configurations, nor under samplers that do not learn from trials, which serve as plain
    baselines. A study that has begun keeps the densities that its declaration still leaves open.
    """
    dimensions = {path: dimension for path, dimension in study.space.dimensions.items() if dimension.undecided}
    if begun is not None:
        return {path: name for path, name in begun.densities.items() if path in dimensions}
    searches = not spec.listed and Kind.of(spec.sampler).guided
    if not searches or not isinstance(getattr(study.config, "train", None), TrainConfig):
        return {}
    names = {path: _name(study, path, dimension) for path, dimension in dimensions.items()}
    return {path: name for path, name in names.items() if name is not None and _holds(dimensions[path], name)}


def notice(chosen: Mapping[str, str]) -> str:
    """Returns the sentence that tells the user of the densities; empty if there are none."""
    if not chosen:
        return ""
    shown = ", ".join(f"{path} (like={name!r})" for path, name in chosen.items())
    return (
        f"half of the search's random draws of {shown} follow the values that did best in public benchmarks; "
        "prior=None on the dimension turns this off"
    )


def _name(study: Study, path: str, dimension: Dimension) -> str | None:
    """Returns the density of a field; None if the optimizers under which the dimension is active do not share one."""
    optimizers = dimension.conditions.get(_OPTIMIZER) or values_of(study, _OPTIMIZER)
    names = {DEFAULTS.get((path, optimizer)) for optimizer in optimizers}
    return names.pop() if len(names) == 1 else None


def _holds(dimension: Dimension, name: str) -> bool:
    """Returns whether a dimension's range holds most of a density's good values: another range means other models."""
    if dimension.scale is None:
        return False
    low, high, _ = dimension.scale
    return densities()[name].share(high) - densities()[name].share(low) >= LEAST
