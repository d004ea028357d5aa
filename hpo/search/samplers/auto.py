"""The sampler that chooses one of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, is_open
from hpo.search.samplers.registry import alone, sampler_spec
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from hpo.space.space import Space

FEW, MANY = 500, 250  # trials up to which freeze-thaw's model, or TPE for several objectives, is asked


def choice(objectives: int, number: int, warm: bool = False) -> str:
    """The sampler of a trial, a function of its number, of how many objectives there are, and of whether the start is
    warm.

    one objective                freeze-thaw, a model of curves and configurations, up to trial 500, then tpe
    one objective, a warm start  tpe, since the trials of another study have no curves here
    several objectives           tpe up to trial 250, then nsga2, nsga3 from four on

    For several objectives as OptunaHub's AutoSampler chooses, but by trials asked instead of complete ones, and with no
    Gaussian process. The model's asks take longer with every trial, so that it is left at last.
    """
    if objectives > 1:
        return "tpe" if number < MANY else "nsga2" if objectives < 4 else "nsga3"
    return "tpe" if warm or number >= FEW else "freeze-thaw"


def rule(objectives: int, warm: bool) -> str:
    """The same in words, for one study."""
    first, then = choice(objectives, 0, warm), choice(objectives, max(FEW, MANY), warm)
    return first if first == then else f"{first} up to trial {MANY if objectives > 1 else FEW}, then {then}"


class Auto:
    """Asks what `choice` says, which is told of every trial, whoever proposed it."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._space, self._objectives, self._seed = space, objectives, seed
        self._records: dict[int, TrialRecord] = {}
        self._earlier: Sequence[TrialRecord] = ()
        self._name = ""
        self._chosen: Sampler | None = None

    def warm(self, records: Sequence[TrialRecord]) -> None:
        """Have complete trials of another study in whatever model is asked."""
        self._earlier = records

    def adopt(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if self._chosen is not None:
            self._chosen.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if self._chosen is not None:
            self._chosen.tell(record)

    def ask(self, number: int) -> Proposal:
        name = choice(len(self._objectives), number, bool(self._earlier))
        proposal = self._sampler(name).ask(number)
        self._records[number] = TrialRecord(
            number,
            "running",
            proposal.coordinates,
            trial_attrs=proposal.trial_attrs,
            study_attrs=proposal.study_attrs,
        )
        return proposal

    def exhausted(self, number: int) -> str:
        return ""

    def _sampler(self, name: str) -> Sampler:
        """The sampler called so, which knows what this one does."""
        if self._chosen is None or name != self._name:
            self._name, self._chosen = (
                name,
                alone(sampler_spec(name), self._space, self._objectives, self._seed, self._earlier),
            )
            for record in self._records.values():
                (self._chosen.adopt if is_open(record) else self._chosen.tell)(record)
        return self._chosen
