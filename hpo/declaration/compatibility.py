"""Checks what a strategy requires of the order, the window and the sampler, and refuses contradictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpo.declaration.budget import Budget
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import Study
from hpo.errors import UserError
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy
from hpo.search.samplers.registry import WARM
from hpo.search.strategies.base import BRINGS, Strategy, make_strategy
from hpo.space.trial_config import TrialShape
from hpo.text import counted

Spec = Mapping[str, Any]


def promotes(strategy: Strategy, order: str | None) -> bool:
    """Whether trials pause under the strategy: then which goes on depends on when a worker is free."""
    promotes = isinstance(strategy, PromotionStrategy)
    if promotes and order == "ordered":
        raise UserError(
            f"--order ordered: under {strategy.name} the trial that goes on is chosen when a worker is free; leave "
            "the order away, and give --workers 1 --window 1 for a study that can be repeated."
        )
    return promotes


def rungs(strategy: Spec) -> None:
    """Raise UserError where a first rung that is not the default's lies at or beyond `max_epochs`, so that there is
    none."""
    if isinstance(asked := strategy.get("strategy"), Mapping):  # by `patient`
        rungs(asked)
    first, last = strategy.get("min_epochs"), strategy.get("max_epochs")
    written = first is not None and first != make_strategy(strategy["name"]).model_dump().get("min_epochs")
    if written and last is not None and first >= last:
        raise UserError(
            f"strategy {strategy['name']!r}: min_epochs={first} is not below max_epochs={last}, so that no trial would "
            "ever stop or wait at a rung: give a smaller min_epochs, or choose strategy 'none'."
        )


def sampler(strategy: Strategy, asked: str | None) -> str | None:
    """The sampler that the strategy brings, if it does."""
    brought = BRINGS.get(strategy.name)
    if brought and asked not in (None, brought):
        raise UserError(f"--sampler {asked}: strategy {strategy.name} brings its own; leave the sampler away.")
    return brought


def generations(
    strategy: Strategy, study: Study, order: str | None, window: int | None, budget: Budget
) -> dict[str, Any]:
    """Order and window of a study whose trials come in generations; empty where they do not.

    Raises UserError for another order or window, for folds, for a space in which nothing may change, and for a `budget`
    of trials or epochs, as newly given, with which the last generation would lack members.
    """
    if not isinstance(strategy, PopulationStrategy):
        return {}
    strategy.check(study.space)
    name, size = strategy.name, strategy.population
    whole(name, study.shape)
    for flag, value in (("--order", None if order == "ordered" else order), ("--window", window)):
        if value is not None:
            raise UserError(
                f"{flag} {value}: under {name} a generation begins once the last one has ended, {size} trials at a "
                "time, however many workers there are; leave it away."
            )
    epochs = study.shape.epochs
    rounds = math.ceil(epochs / strategy.interval) if epochs < math.inf else 1
    if budget.trials is not None and budget.trials < rounds * size:
        why = f"{counted(rounds, 'generation')}, since a trial is one member's {strategy.interval} of {epochs} epochs"
        if epochs == math.inf:
            why = "1 generation, since the study does not declare how many epochs a trial has (num_epochs)"
        raise UserError(
            f"--trials {budget.trials}: {name} needs --trials {rounds * size}, {size} members in {why}: give that "
            "many, or declare another population or interval of the strategy."
        )
    last = epochs - (rounds - 1) * strategy.interval  # of each member; the trial asked for last may exceed the budget
    if budget.epochs is not None and epochs < math.inf and budget.epochs <= size * epochs - last:
        raise UserError(
            f"--epochs {budget.epochs}: {name} needs --epochs {size * epochs}, {size} members of {epochs} epochs each, "
            "to train its population to the end: give that many, or declare a smaller population of the strategy."
        )
    return {"order": "ordered", "window": size}


def whole(name: str, shape: TrialShape) -> None:
    """Raise UserError where a trial, which is to go on from another's checkpoint under `name`, trains several times."""
    for parts, number in (("folds", shape.folds), ("seeds", shape.seeds)):
        if number != 1:
            raise UserError(
                f"train.{parts}={number}: under {name} a trial goes on from another's checkpoint, and each of the "
                f"{parts} trains a model of its own: leave the {parts} away, or choose another."
            )


def check(resolved: ResolvedStudy) -> None:
    """Raise UserError where the sampler cannot do what the strategy or the warm start asks of it."""
    study, spec = resolved.study, resolved.spec
    if spec.earlier and spec.sampler not in WARM:
        raise UserError(
            f"--warm-start {spec.warm_start}: sampler {spec.sampler!r} has no model that its trials could enter; "
            f"choose one of {', '.join(WARM)}."
        )
    breeds, sampling = resolved.population, spec.sampling()
    if breeds and spec.sampler == "grid" and study.space.grid_ends(breeds.population - 1, sampling["points"]):
        raise UserError(
            f"--sampler grid: it has {study.space.grid_size(sampling['points'])} points, and a population of "
            f"{breeds.population} needs as many to begin with: choose another sampler."
        )
