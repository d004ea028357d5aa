"""Resolves what a study is, once for each process: its declaration and its specification, and what these decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpo.declaration.references import load
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy
from hpo.search.strategies.base import Strategy, has_rungs, make_strategy


@dataclass(frozen=True)
class ResolvedStudy:
    """A study as a driver, a worker or an analysis has it in hand, whichever door it came by.

    study   the declaration, configured: its `shape` says how its trials are trained, `trains_itself` by whom
    spec    what else was asked for, as the ledger stores it
    """

    study: Study
    spec: StudySpec

    @classmethod
    def stored(cls, spec: Mapping[str, Any]) -> ResolvedStudy:
        """The study of a row's `spec`; loads the declaration. What is to be tried first only the spec has."""
        found = StudySpec.from_json(spec)
        declared = load(found.reference)
        declared = declared if found.tier is None else declared.upto(found.tier)
        return cls(declared.configure(found.overrides, enqueue=()), found)

    @cached_property
    def strategy(self) -> Strategy:
        return make_strategy(self.spec.strategy)

    @property
    def promotion(self) -> PromotionStrategy | None:
        """The strategy where trials pause under it."""
        return self.strategy if isinstance(self.strategy, PromotionStrategy) else None

    @property
    def population(self) -> PopulationStrategy | None:
        """The strategy where trials come in generations under it."""
        return self.strategy if isinstance(self.strategy, PopulationStrategy) else None

    @property
    def bounded(self) -> bool:
        """Whether the strategy only ever ranks losses, so that constraints enter their order."""
        return has_rungs(self.strategy)
