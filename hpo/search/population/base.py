"""Defines the contract of population strategies and their common part, truncation selection (Jaderberg et al. 2017,
"Population Based Training of Neural Networks", section 4.1). Each trial continues one of the generation before.

Trial n is member n % P of generation n // P. `decide` pauses it at the end of its generation. Once a whole generation
has ended, the driver asks for the next one, and the sampler chooses for each trial the checkpoint it starts from and
the changes to its configuration. These are functions of the study's seed, the trial's number and the generations
before, so any number of workers and any interruption give the same study.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import Field

from hpo.errors import UserError
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.strategies.base import BaseStrategy, History, Strategy
from hpo.search.strategies.registry import make_strategy
from hpo.space.dimensions import Float
from hpo.space.objective import Objective
from hpo.space.trial_config import TrialShape
from trainer.report import CONTINUE, Verdict

if TYPE_CHECKING:
    from numpy.random import Generator

    from hpo.space.space import Space

# Trainer fields that a checkpoint depends on, or that have no effect once training has begun.
SETTLED = (
    *("train.num_epochs", "train.batch_size", "train.micro_batch_size", "train.batch_growth.*", "train.seed"),
    *("train.precision", "train.optim.name", "train.optim.d0", "train.init.*", "train.parallel.*"),
    *("train.average.*", "train.device", "train.resume_from"),
)


@runtime_checkable
class PopulationStrategy(Strategy, Protocol):
    """A strategy under which trials form generations."""

    population: int
    interval: int

    def begin(self, number: int) -> int:
        """Returns the first trial of the generation of trial `number`; all trials before it end before it is asked."""
        ...

    def end(self, number: int) -> int:
        """Returns the epoch at which the generation of trial `number` ends."""
        ...

    def check(self, space: Space) -> None:
        """Raises UserError if no dimension of the space can change in the middle of training."""
        ...

    def sampler(
        self,
        first: Sampler,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        versions: Mapping[str, int] = MappingProxyType({}),
    ) -> Sampler:
        """Returns the sampler of all generations; `first` proposes the first one. `versions` as in `make_sampler`."""
        ...


def breeding(spec: str | Mapping[str, Any]) -> PopulationStrategy | None:
    """Returns the strategy of a specification if it is a population strategy, else None."""
    strategy = make_strategy(spec)
    return strategy if isinstance(strategy, PopulationStrategy) else None


def planned_epochs(config: Mapping[str, Any], breeds: PopulationStrategy | None, number: int, start: int) -> float:
    """Returns the largest number of epochs of trial `number`, which begins at epoch `start`.

    It is infinite if the configuration sets no bound, so that callers wait for the trial's end.
    """
    end = breeds.end(number) if breeds else math.inf
    return max(min(TrialShape.of(config).epochs, end) - start, 0)


class Generations(BaseStrategy):
    """The base of population strategies.

    population   members of a generation, 2 or more
    interval     epochs of a generation
    quantile     the share of members replaced at the end of a generation; the donors are as large a share
    resample     the probability with which a dimension is drawn anew instead of perturbed
    perturb      patterns of the dimensions that may change in the middle of training; None: every Float except those
                 that the trainer cannot change (SETTLED)

    At the end of a generation the worst max(1, floor(quantile P)) members are replaced, and so is every member that
    failed, has a loss that is not finite, or ended by its own rule. A replacement continues from the checkpoint of a
    donor, drawn uniformly from the best members, equally many; it keeps the donor's configuration except where
    `perturb` allows a change. All other members continue unchanged.
    """

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
        """Returns the paths of the dimensions that may change.

        Raises UserError if there are none, or if `perturb` names a dimension that cannot change.
        """
        if self.perturb is None:
            paths = set(changing(space))
        else:
            paths = {path for path in space.paths if _matches(path, self.perturb)}
            unused = [name for name in self.perturb if not any(fnmatchcase(path, name) for path in space.paths)]
            wrong = [f"{name} matches no dimension of the space" for name in unused]
            wrong += [
                f"{path} cannot change in the middle of training" for path in sorted(paths) if _matches(path, SETTLED)
            ]
            for path in sorted(paths):
                wrong += [f"{path} decides over {other}, which is to stay" for other in _deciding(path, paths, space)]
            if wrong:
                raise UserError(f"perturb={self.perturb!r}: {wrong[0]}; name other dimensions.")
        if not paths:
            raise UserError(
                f"the space ({', '.join(space.paths) or 'which is empty'}) has no dimension that may change in the "
                "middle of training, so a population is of no use: choose another strategy, or name one by the "
                "option perturb."
            )
        return tuple(sorted(paths))


def changing(space: Space) -> dict[str, Float]:
    """Returns path -> Float for the Floats that may change in the middle of training.

    Excluded are those that the trainer cannot change (SETTLED) and those that a fixed dimension depends on.
    """
    floats = {path: dimension for path, dimension in space.dimensions.items() if isinstance(dimension, Float)}
    paths = {path for path in floats if not _matches(path, SETTLED)}
    return {path: floats[path] for path in floats if path in paths and not _deciding(path, paths, space)}


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _deciding(path: str, changeable: set[str], space: Space) -> list[str]:
    """Returns the dimensions that may not change and depend on the dimension at `path`."""
    return [other for other in space.paths if other not in changeable and path in space.references(other)]


class Population(ABC):
    """The sampler of a population; subclasses define how a replacement's configuration changes."""

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
        """Returns the coordinates of trial `number`: those of its `donor`, with changes where they are allowed."""

    def adopt(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if record.number < self._size:
            self._first.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if record.number < self._size:
            self._first.tell(record)

    def exhausted(self, number: int) -> str:
        """Returns why no generation follows; empty while there is a next one.

        The first generation is full even if the space has fewer configurations: its members diverge later.
        """
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
        """Returns the generation before that of trial `number`."""
        begin = self._strategy.begin(number)
        return [self._records[earlier] for earlier in range(begin - self._size, begin)]

    def _loss(self, record: TrialRecord) -> float:
        return self._sign * record.curve[-1][1] if record.curve else math.nan

    def _ranked(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Returns the trials that others can continue from, best first.

        They paused and their loss is finite. Trials that break a constraint rank behind all others.
        """
        going = [record for record in records if record.state == "pruned" and math.isfinite(self._loss(record))]
        beyond = {record.number: sum(excess for excess in record.violations if excess > 0) for record in going}
        return sorted(going, key=lambda record: (beyond[record.number], self._loss(record), record.number))

    def _going_on(self, number: int) -> tuple[list[TrialRecord], set[int]]:
        """Returns the donors for the generation of trial `number`, and the numbers of members that do not change."""
        ranked = self._ranked(self._before(number))
        count = max(1, int(self._strategy.quantile * self._size))
        return ranked[:count], {record.number for record in ranked[: self._size - count]}

    def _bred(self, number: int) -> Proposal:
        from numpy.random import default_rng

        seed = ask_seed(self._seed, number)
        donors, stay = self._going_on(number)
        if number - self._size in stay:
            parent = self._records[number - self._size]
            return Proposal(self._whole(parent), seed, parent=parent.number)
        rng = default_rng(seed)
        donor = donors[int(rng.integers(len(donors)))]
        explored = (self._explore(number, donor, rng) for _ in range(_TRIES if self._space.rejects else 1))
        valid = (coordinates for coordinates in explored if not self._space.fault(self._space.decode(coordinates)))
        changed = next(valid, None)
        return Proposal(self._whole(donor) if changed is None else changed, seed, parent=donor.number)

    def _whole(self, record: TrialRecord) -> dict[str, Any]:
        """Returns the trial's coordinates, with the middle of the range for dimensions added since it was proposed."""
        return {**self._space.from_unit([0.5] * len(self._space)), **record.coordinates}


_OPEN = ("waiting", "running", "paused")
_TRIES = 16  # attempts at a change that keeps to the rules; if all fail the donor's configuration is kept
