"""Checks what a strategy requires of the order, the window and the sampler, and refuses contradictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpo.declaration.budget import Budget
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.search_preset import of_search_alone
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy, Waiting
from hpo.search.samplers.registry import WARM, Kind
from hpo.search.strategies.base import Strategy
from hpo.search.strategies.registry import make_strategy
from hpo.space.assignments import NO_PRESET
from hpo.text import counted

Spec = Mapping[str, Any]


def promotes_freely(strategy: Strategy, order: str | None) -> bool:
    """Returns whether the next paused trial is chosen when a worker becomes free: if trials pause and not in order.

    Raises UserError for a strategy under which trials cannot pause in order.
    """
    if not isinstance(strategy, PromotionStrategy):
        return False
    if order == "ordered" and not isinstance(strategy, Waiting):
        raise UserError(
            f"{option('order', 'ordered')}: strategy {strategy.name!r} has no wait(history), which says at which "
            f"reports a trial pauses in order: add it, or leave out {option('order')}."
        )
    return order != "ordered"


def rungs(strategy: Spec) -> None:
    """Raises UserError if a first rung other than the default lies at or beyond `max_epochs`, so no rung is left."""
    if isinstance(inner := strategy.get("strategy"), Mapping):  # by `patient`
        rungs(inner)
    first, last = strategy.get("min_epochs"), strategy.get("max_epochs")
    written = first is not None and first != make_strategy(strategy["name"]).model_dump().get("min_epochs")
    if written and last is not None and first >= last:
        raise UserError(
            f"strategy {strategy['name']!r}: min_epochs={first} is not below max_epochs={last}, so that no trial would "
            "ever stop or wait at a rung: give a smaller min_epochs, or choose strategy 'none'."
        )


def sampler(strategy: Strategy, asked: str | None) -> str | None:
    """Returns the strategy's own sampler, if it has one."""
    brought = strategy.brings
    if brought and asked not in (None, brought):
        raise UserError(f"{option('sampler', asked)}: strategy {strategy.name} uses its own sampler; omit this option.")
    return brought


def generations(
    strategy: Strategy, study: Study, order: str | None, window: int | None, budget: Budget
) -> dict[str, Any]:
    """Returns the order and window of a study whose trials come in generations; empty for other studies.

    Raises UserError for another order or window, for folds, for a space in which nothing may change, and for a new
    `budget` of trials or epochs with which the last generation would lack members.
    """
    if not isinstance(strategy, PopulationStrategy):
        return {}
    strategy.check(study.space)
    name, size = strategy.name, strategy.population
    whole(name, study)
    for field, value in (("order", None if order == "ordered" else order), ("window", window)):
        if value is not None:
            raise UserError(
                f"{option(field, value)}: under {name} a generation begins once the last one has ended, {size} trials "
                "at a time for any number of workers; omit this option."
            )
    epochs = study.shape.epochs
    rounds = math.ceil(epochs / strategy.interval) if epochs < math.inf else 1
    if budget.trials is not None and budget.trials < rounds * size:
        why = f"{counted(rounds, 'generation')}, since a trial is one member's {strategy.interval} of {epochs} epochs"
        if epochs == math.inf:
            why = "1 generation, since the study does not declare how many epochs a trial has (num_epochs)"
        raise UserError(
            f"{option('trials', budget.trials)}: {name} needs {option('trials', rounds * size)}, {size} members in "
            f"{why}: give that "
            "many, or declare another population or interval of the strategy."
        )
    last = epochs - (rounds - 1) * strategy.interval  # of each member; the trial asked for last may exceed the budget
    if budget.epochs is not None and epochs < math.inf and budget.epochs <= size * epochs - last:
        raise UserError(
            f"{option('epochs', budget.epochs)}: {name} needs {option('epochs', size * epochs)}, {size} members of "
            f"{epochs} epochs each, "
            "to train its population to the end: give that many, or declare a smaller population of the strategy."
        )
    return {"order": "ordered", "window": size}


def whole(name: str, study: Study) -> None:
    """Raises UserError if a trial, which continues from another's checkpoint under `name`, trains several times."""
    for parts, number in (("folds", study.shape.folds), ("seeds", study.shape.seeds)):
        if number != 1:
            raise UserError(
                f"train.{parts}={number}: under {name} a trial goes on from another's checkpoint, and each of the "
                f"{parts} trains a model of its own: {_once(study, parts)}, or choose another strategy."
            )


def _once(study: Study, parts: str) -> str:
    """Returns the setting under which a trial trains once."""
    by_preset = f"train.{parts}" in of_search_alone(study)
    return f"give {option('overrides', f'preset={NO_PRESET}')}" if by_preset else f"set train.{parts}=1"


def check(resolved: ResolvedStudy) -> None:
    """Raises UserError if the sampler does not support the strategy or the warm start."""
    study, spec = resolved.study, resolved.spec
    taught = [spec.warm_start] if spec.earlier else spec.learn_from if spec.knowledge else []
    if taught and not Kind.of(spec.sampler).warms:
        raise UserError(
            f"{option('learn_from', ','.join(map(str, taught)))}: sampler {spec.sampler!r} does not learn from other "
            "studies; "
            f"choose one of {', '.join(WARM)}."
        )
    breeds, sampling = resolved.population, spec.sampling()
    if breeds and spec.sampler == "grid" and study.space.grid(sampling["points"]).ends(breeds.population - 1):
        raise UserError(
            f"{option('sampler', 'grid')}: it has {study.space.grid(sampling['points']).size} points, and a "
            "population of "
            f"{breeds.population} needs as many to begin with: choose another sampler."
        )
