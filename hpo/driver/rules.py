"""Holds the rules of a study: its bounds, and the order and window in which its sampler learns of ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.declaration.budget import Budget
from hpo.declaration.goal import Goal
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy

if TYPE_CHECKING:
    from hpo.declaration.resolved import ResolvedStudy


@dataclass(frozen=True)
class Rules:
    """The rules that a driver follows; they do not change while the study is driven."""

    order: str
    window: int
    budget: Budget
    goal: Goal
    objectives: Sequence[Mapping[str, Any]]
    promotion: PromotionStrategy | None = None
    population: PopulationStrategy | None = None

    @classmethod
    def of(cls, resolved: ResolvedStudy, budget: Budget, goal: Goal) -> Rules:
        """Returns the rules of a study."""
        spec = resolved.spec
        strategies = resolved.promotion, resolved.population
        return cls(spec.order, spec.window, budget, goal, spec.objectives, *strategies)

    @property
    def stepped(self) -> bool:
        """Returns whether trials pause in order, so that the study is a sequence of steps (hpo/driver/steps.py)."""
        return self.order == "ordered" and self.promotion is not None

    def known_to(self, number: int) -> int:
        """Returns the first trial whose end is unknown to ask `number` in ordered mode. A member of a population knows
        all generations before its own."""
        return self.population.begin(number) if self.population else number - self.window + 1

    def within_budget(self, trials: int, epochs: Iterable[float]) -> bool:
        """Returns whether the budget is larger than this many trials and these epochs."""
        return (self.budget.trials is None or trials < self.budget.trials) and self.within_epochs(epochs)

    def within_epochs(self, epochs: Iterable[float]) -> bool:
        """Returns whether the budget has more epochs than these sum to."""
        return self.budget.epochs is None or sum(epochs) < self.budget.epochs
