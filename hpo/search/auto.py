"""The sampler that chooses one of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpo.objective import Objective
from hpo.search.sampler import Proposal, Sampler, TrialRecord, is_open
from hpo.search.samplers import make_sampler

if TYPE_CHECKING:
    from hpo.space import Space

FEW, MANY = 100, 250  # trials up to which a Gaussian process, or TPE for several objectives, is asked


def choice(space: Space, objectives: Sequence[Objective], number: int) -> str:
    """The sampler of trial `number`, a function of the space, the objectives and the number alone.

    one objective, every dimension a number, none conditional   gp up to trial 100, then cmaes, started from its trials
    one objective, any other space                              tpe
    several objectives                                          tpe up to trial 250, then nsga2, nsga3 from four on

    As OptunaHub's AutoSampler chooses, but by trials asked instead of complete ones, and earlier away from the Gaussian
    process, whose asks take longer than many a short trial; for several objectives it has none here.
    """
    if len(objectives) > 1:
        return "tpe" if number < MANY else "nsga2" if len(objectives) < 4 else "nsga3"
    plain = all(
        seen[0] != "choice" and not space.dimensions[path].conditions for path, seen in space.coordinates.items()
    )
    return "tpe" if not plain else "gp" if number < FEW else "cmaes"


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
        proposal = self._sampler(choice(self._space, self._objectives, number)).ask(number)
        self._records[number] = TrialRecord(
            number,
            "running",
            proposal.coordinates,
            trial_attrs=proposal.trial_attrs,
            study_attrs=proposal.study_attrs,
        )
        return proposal

    def exhausted(self, number: int) -> bool:
        return False

    def _sampler(self, name: str) -> Sampler:
        """The sampler called so, which knows what this one does."""
        if self._chosen is None or name != self._name:
            self._name, self._chosen = (
                name,
                make_sampler(name, self._space, self._objectives, self._seed, earlier=self._earlier),
            )
            for record in self._records.values():
                (self._chosen.adopt if is_open(record) else self._chosen.tell)(record)
        return self._chosen
