"""Resolves a study once for each process from its declaration and its specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hpo.declaration.budget import Budget
from hpo.declaration.references import load
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.search.confirming import Confirm, parse
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy, Waiting
from hpo.search.strategies.base import History, Strategy
from hpo.search.strategies.registry import make_strategy
from hpo.space.space import Space
from trainer.report import Verdict


@dataclass(frozen=True)
class ResolvedStudy:
    """A study as drivers, workers and analyses use it, however it was started.

    study   the declaration, configured: its `shape` tells how its trials are trained, `trains_itself` by whom
    spec    the other options, as the ledger stores them
    """

    study: Study
    spec: StudySpec

    @classmethod
    def stored(cls, spec: Mapping[str, object]) -> ResolvedStudy:
        """Returns the study of a row's `spec`, loading the declaration.

        Only the spec has the trials to be tried first.
        """
        study_spec = StudySpec.from_json(spec)
        declared = load(study_spec.reference)
        declared = declared if study_spec.tier is None else declared.upto(study_spec.tier)
        return cls(declared.configure(study_spec.overrides, enqueue=()), study_spec)

    @cached_property
    def space(self) -> Space:
        """Returns the space from which the sampler draws, with the densities that it follows by default."""
        return self.study.space.following(self.spec.densities)

    @cached_property
    def strategy(self) -> Strategy:
        return make_strategy(self.spec.strategy)

    @property
    def promotion(self) -> PromotionStrategy | None:
        """Returns the strategy if trials pause under it, else None."""
        return self.strategy if isinstance(self.strategy, PromotionStrategy) else None

    @property
    def stepped(self) -> bool:
        """Returns whether trials pause in order, so that a promotion does not depend on the number of workers."""
        return self.promotion is not None and self.spec.order == "ordered"

    @property
    def decide(self) -> Callable[[History], Verdict]:
        """Returns how the strategy judges a report; in ordered mode a trial waits at each rung, whatever the others'
        values."""
        return self.strategy.wait if self.stepped and isinstance(self.strategy, Waiting) else self.strategy.decide

    @property
    def finishes(self) -> bool:
        """Returns whether an end phase may follow the search.

        None follows a list of configurations, or a population, whose members continue from each other.
        """
        return self.spec.finish == "auto" and self._searches

    @property
    def confirms(self) -> Confirm | None:
        """Returns how the best trials are confirmed after the search; None where they are not."""
        return parse(self.spec.confirm) if self._searches else None

    @property
    def _searches(self) -> bool:
        return not self.spec.listed and self.population is None

    def searching(self, budget: Budget, confirmed: int) -> Budget:
        """Returns the budget of the search: of the epochs, it leaves to the confirming phase what that may need.

        confirmed  the number of trainings that the phase has listed before
        """
        if (confirm := self.confirms) is None or budget.epochs is None:
            return budget
        reserved = confirm.reserved(budget.epochs, self._confirming_epochs(confirm), confirmed)
        return replace(budget, epochs=budget.epochs - reserved)

    def _confirming_epochs(self, confirm: Confirm) -> float:
        """Returns the epochs that a training of the confirming phase counts as, at most."""
        shape = self.study.shape
        if not (confirm.by_fold and shape.parts > 1 and self.study.folds):
            return shape.epochs
        folds = self.study.folds[0].get("train.folds")
        return (folds if isinstance(folds, int) else shape.folds) * shape.seeds

    @property
    def population(self) -> PopulationStrategy | None:
        """Returns the strategy if its trials form generations, else None."""
        return self.strategy if isinstance(self.strategy, PopulationStrategy) else None

    @property
    def bounded(self) -> bool:
        """Returns whether the strategy only ranks losses, so that constraints enter their order."""
        return self.strategy.rungs
