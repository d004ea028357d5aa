"""Populations: trials in generations, each of which goes on from one of the generation before. The contract of such
strategies, and what they have in common: truncation selection (Jaderberg et al. 2017, "Population Based Training of
Neural Networks", section 4.1).

Trial n is member n % P of generation n // P. `decide` pauses it at the end of its generation; once all of a generation
have ended the driver asks for the next one, whose sampler says from whose checkpoint each goes on, and how it is
changed. What it says is a function of the study's seed, the trial's number and the generations before, so any number of
workers and any interruption give the same study.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from hpo.errors import UserError
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.strategies.base import History, Strategy, make_strategy
from hpo.space.dimensions import Float
from hpo.space.objective import Objective
from hpo.space.trial_config import TrialShape
from trainer.report import CONTINUE, Verdict

if TYPE_CHECKING:
    from numpy.random import Generator

    from hpo.space.space import Space

# Fields of the trainer that a checkpoint is bound to, or that have done their work once training has begun.
SETTLED = (
    *("train.num_epochs", "train.batch_size", "train.micro_batch_size", "train.batch_growth.*", "train.seed"),
    *("train.precision", "train.optim.name", "train.init.*", "train.parallel.*"),
    *("train.average.*", "train.device", "train.resume_from"),
)


@runtime_checkable
class PopulationStrategy(Strategy, Protocol):
    """A strategy under which trials come in generations."""

    population: int
    interval: int

    def begin(self, number: int) -> int:
        """The first trial of the generation that trial `number` is of; all before it have ended when it is asked."""
        ...

    def end(self, number: int) -> int:
        """The epoch at which the generation of trial `number` ends."""
        ...

    def check(self, space: Space) -> None:
        """Raise UserError where nothing of the space can change in the middle of training."""
        ...

    def sampler(
        self,
        first: Sampler,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        versions: Mapping[str, int] = MappingProxyType({}),
    ) -> Sampler:
        """Returns the sampler of all generations; `first` asks for the first one. `versions` as in `make_sampler`."""
        ...


def breeding(spec: str | Mapping[str, Any]) -> PopulationStrategy | None:
    """The strategy of a specification where it is one of these."""
    strategy = make_strategy(spec)
    return strategy if isinstance(strategy, PopulationStrategy) else None


def planned_epochs(config: Mapping[str, Any], breeds: PopulationStrategy | None, number: int, start: int) -> float:
    """The most epochs that trial `number` trains, which begins at epoch `start`; infinity where its configuration does
    not say, so that its end is waited for."""
    end = breeds.end(number) if breeds else math.inf
    return max(min(TrialShape.of(config).epochs, end) - start, 0)


class Generations(BaseModel):
    """What the strategies of populations share.

    population   members of a generation, 2 or more
    interval     epochs of a generation
    quantile     the share of members that is replaced at its end, and of those that may replace them
    resample     the probability with which a dimension is drawn anew where it would be perturbed
    perturb      patterns of the dimensions that may change in the middle of training; None: every Float but those
                 the trainer cannot change (SETTLED)

    At the end of a generation the worst max(1, floor(quantile P)) members, and whoever has failed, is not finite or has
    ended by a rule of its own, are replaced: each goes on from the checkpoint of one of as many best, drawn uniformly,
    with its whole configuration but for what `perturb` lets change. All others go on as they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    population: int = Field(default=8, ge=2)
    interval: int = Field(default=1, ge=1)
    quantile: float = Field(default=0.25, gt=0.0, le=0.5)
    resample: float = Field(default=0.25, ge=0.0, le=1.0)
    perturb: list[str] | None = Field(default=None, min_length=1)

    def begin(self, number: int) -> int:
        return number - number % self.population

    def end(self, number: int) -> int:
        return (number // self.population + 1) * self.interval

    def wants(self, epoch: int) -> bool:
        return epoch >= self.interval

    def decide(self, history: History) -> Verdict:
        if history.epoch < self.end(history.number):
            return CONTINUE
        generation = history.number // self.population
        return Verdict("pause", reason=f"generation {generation} ends at epoch {self.end(history.number)}")

    def check(self, space: Space) -> None:
        self.changeable(space)

    def changeable(self, space: Space) -> tuple[str, ...]:
        """The paths of the dimensions that may change. Raises UserError where there is none, or one cannot."""
        if self.perturb is None:
            found = set(changing(space))
        else:
            found = {path for path in space.paths if _matches(path, self.perturb)}
            unused = [one for one in self.perturb if not any(fnmatchcase(path, one) for path in space.paths)]
            wrong = [f"{one} matches no dimension of the space" for one in unused]
            wrong += [
                f"{path} cannot change in the middle of training" for path in sorted(found) if _matches(path, SETTLED)
            ]
            for path in sorted(found):
                wrong += [f"{path} decides over {other}, which is to stay" for other in _deciding(path, found, space)]
            if wrong:
                raise UserError(f"perturb={self.perturb!r}: {wrong[0]}; name other dimensions.")
        if not found:
            raise UserError(
                f"the space ({', '.join(space.paths) or 'which is empty'}) has no dimension that may change in the "
                "middle of training, so a population is of no use: choose another strategy, or name one by the "
                "option perturb."
            )
        return tuple(sorted(found))


def changing(space: Space) -> dict[str, Float]:
    """Path -> Float, of those that may change in the middle of training: all but those that the trainer cannot change
    (SETTLED), and those that decide over a dimension which is to stay."""
    floats = {path: one for path, one in space.dimensions.items() if isinstance(one, Float)}
    found = {path for path in floats if not _matches(path, SETTLED)}
    return {path: floats[path] for path in floats if path in found and not _deciding(path, found, space)}


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _deciding(path: str, found: set[str], space: Space) -> list[str]:
    """The dimensions that may not change and depend on the one at `path`."""
    return [other for other in space.paths if other not in found and path in space.references(other)]


class Population(ABC):
    """The sampler of a population; how a replaced member is changed is for the strategy to say."""

    def __init__(
        self, strategy: Generations, first: Sampler, space: Space, objectives: Sequence[Objective], seed: int
    ) -> None:
        self._strategy, self._first, self._space, self._seed = strategy, first, space, seed
        self._size = strategy.population
        self._sign = -1.0 if objectives[0].direction == "maximize" else 1.0
        self._paths = strategy.changeable(space)
        self._records: dict[int, TrialRecord] = {}

    @abstractmethod
    def _explore(self, number: int, donor: TrialRecord, rng: Generator) -> dict[str, Any]:
        """The coordinates of trial `number`, which goes on from `donor`, with what may change changed."""

    def adopt(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if record.number < self._size:
            self._first.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if record.number < self._size:
            self._first.tell(record)

    def exhausted(self, number: int) -> str:
        """The first generation is as large as it is, though a space has fewer configurations: they part later."""
        before = self._before(number) if number >= self._size else []
        if not before or any(record.state in _OPEN for record in before) or self._ranked(before):
            return ""
        whole = any(record.state == "complete" for record in before)
        return "its population is trained" if whole else "nobody of the last generation is left to go on from"

    def ask(self, number: int) -> Proposal:
        proposal = self._first.ask(number) if number < self._size else self._bred(number)
        self._records[number] = TrialRecord(number, "running", proposal.coordinates, parent=proposal.parent)
        return proposal

    def _before(self, number: int) -> list[TrialRecord]:
        """The generation before that of trial `number`."""
        begin = self._strategy.begin(number)
        return [self._records[one] for one in range(begin - self._size, begin)]

    def _loss(self, record: TrialRecord) -> float:
        return self._sign * record.curve[-1][1] if record.curve else math.nan

    def _ranked(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Those that others can go on from, the best first, who breaks a constraint behind: they paused, and their loss
        is finite."""
        going = [record for record in records if record.state == "pruned" and math.isfinite(self._loss(record))]
        beyond = {one.number: sum(violation for violation in one.violations if violation > 0) for one in going}
        return sorted(going, key=lambda record: (beyond[record.number], self._loss(record), record.number))

    def _going_on(self, number: int) -> tuple[list[TrialRecord], set[int]]:
        """For the generation of trial `number`: the donors, and the numbers of those that go on as they are."""
        ranked = self._ranked(self._before(number))
        count = max(1, int(self._strategy.quantile * self._size))
        return ranked[:count], {record.number for record in ranked[: self._size - count]}

    def _bred(self, number: int) -> Proposal:
        from numpy.random import default_rng

        seed = ask_seed(self._seed, number)
        donors, stay = self._going_on(number)
        if number - self._size in stay:
            own = self._records[number - self._size]
            return Proposal(self._whole(own), seed, parent=own.number)
        rng = default_rng(seed)
        donor = donors[int(rng.integers(len(donors)))]
        explored = (self._explore(number, donor, rng) for _ in range(_TRIES if self._space.rejects else 1))
        tried = next((one for one in explored if not self._space.fault(self._space.decode(one))), None)
        return Proposal(self._whole(donor) if tried is None else tried, seed, parent=donor.number)

    def _whole(self, record: TrialRecord) -> dict[str, Any]:
        """The trial's coordinates, and the middle of dimensions that are newer than it."""
        return {**self._space.from_unit([0.5] * len(self._space)), **record.coordinates}


_OPEN = ("waiting", "running", "paused")
_TRIES = 16  # of a change that keeps to the rules; else the donor goes on unchanged
