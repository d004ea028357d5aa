"""Keeps Optuna's samplers in step with the ledger.

Optuna serves as a library: an in-memory study mirrors the trials told and open, and every ask gets a fresh sampler with
its own seed, so no state of a sampler has to survive a restart.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from hpo.search.samplers.base import Proposal, TrialRecord, ask_seed, is_open
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from hpo.space.space import Coordinate, Space


def distribution(coordinate: Coordinate) -> BaseDistribution:
    """Returns Optuna's distribution for a coordinate."""
    kind, *rest = coordinate
    if kind == "float":
        low, high, log, step = rest
        return FloatDistribution(low, high, log=log, step=step)
    if kind == "int":
        low, high, log, step = rest
        return IntDistribution(low, high, log=log, step=step)
    if kind == "choice":
        return CategoricalDistribution(range(rest[0]))
    return FloatDistribution(0.0, 1.0)


@contextmanager
def quiet_optuna() -> Generator[None]:
    """Hides Optuna's log lines and experimental warnings from the user."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def quiet_study(
    directions: Sequence[Literal["minimize", "maximize"]],
    storage: InMemoryStorage | None = None,
    name: str | None = None,
) -> optuna.Study:
    """Returns a new study in memory, without the line that Optuna logs about it."""
    with quiet_optuna():
        return optuna.create_study(directions=directions, storage=storage, study_name=name)


class _Replay(BaseSampler):
    """Repeats the draw of an earlier ask."""

    def __init__(self, coordinates: Mapping[str, Any]) -> None:
        self._coordinates = coordinates

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._coordinates[param_name]


class OptunaSampler(ABC):
    """The base of Optuna's samplers; subclasses define how trials enter their models.

    Optuna numbers trials in the order they arrive, so they enter its study in number order, at the first ask that needs
    them. System attributes whose names begin with `KEEPS` are kept with the proposals and return with the records.
    """

    KEEPS: tuple[str, ...] = ()

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._seed = seed
        self._directions: list[Literal["minimize", "maximize"]] = [objective.direction for objective in objectives]
        self._distributions = {path: distribution(seen) for path, seen in space.coordinates.items()}
        self._records: dict[int, TrialRecord] = {}
        self._earlier: Sequence[TrialRecord] = ()
        self._clear()

    @abstractmethod
    def _sampler(self, seed: int) -> BaseSampler:
        """Returns Optuna's sampler for one ask."""

    def _enter(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Ends a running trial of Optuna's study according to its record, unless the record is open."""
        if not is_open(record):
            for name, violation in _constraints(record).items():
                trial.set_constraint(name, violation)
            self._end(trial, record)

    @abstractmethod
    def _end(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Ends a trial of Optuna's study according to its record, which is not open."""

    def _clear(self) -> None:
        """Replaces Optuna's study by a new one, which the next ask fills from the records."""
        self._storage = InMemoryStorage()
        self._study = quiet_study(self._directions, self._storage)
        self._study_id = self._storage.get_study_id_from_name(self._study.study_name)
        self._trials: list[optuna.Trial] = []
        for record in self._earlier:
            self._replay(record)
        self._trials = []

    def warm(self, records: Sequence[TrialRecord]) -> None:
        """Adds trials of another study, each with every coordinate, to the model as if they had been tried here."""
        self._earlier = records
        self._clear()

    def adopt(self, record: TrialRecord) -> None:
        self._take(record)

    def tell(self, record: TrialRecord) -> None:
        self._take(record)

    def _take(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if record.number >= len(self._trials):
            return
        known = self._attributes_of(record.number)
        if known.state.is_finished() or known.params.keys() != record.coordinates.keys():
            self._clear()  # a trial that has ended in Optuna's study, such as a paused one, cannot continue there
            return
        if known.params != record.coordinates:
            self._move(self._trials[record.number], record.coordinates)
        self._enter(self._trials[record.number], record)

    def _move(self, trial: optuna.Trial, coordinates: Mapping[str, Any]) -> None:
        """Changes the parameters of a running trial of Optuna's study."""
        for path, value in coordinates.items():
            kind = self._distributions[path]
            self._storage.set_trial_param(self._id(trial), path, kind.to_internal_repr(value), kind)

    def _id(self, trial: optuna.Trial) -> int:
        """Returns the id of a trial in Optuna's storage."""
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)

    def _attributes_of(self, number: int) -> Any:
        return self._storage.get_trial(self._id(self._trials[number]))

    def ask(self, number: int) -> Proposal:
        self._catch_up(number)
        seed = ask_seed(self._seed, number)
        before = self._study_attributes()
        with quiet_optuna():
            trial = self._ask(self._sampler(seed % 2**32), self._distributions)
        coordinates = {path: self._coordinate(path, trial.params[path]) for path in self._distributions}
        trial_attrs = self._kept(self._attributes_of(number).system_attrs)
        after = self._study_attributes()
        study_attrs = {key: value for key, value in after.items() if key not in before}
        self._records[number] = TrialRecord(number, "running", coordinates, None, (), trial_attrs, study_attrs)
        return Proposal(coordinates, seed, trial_attrs=trial_attrs, study_attrs=study_attrs)

    def _coordinate(self, path: str, drawn: Any) -> Any:
        """Returns the coordinate for a value that Optuna has drawn."""
        return drawn

    def exhausted(self, number: int) -> str:
        return ""

    def _catch_up(self, number: int) -> None:
        """Adds all trials before `number` to Optuna's study."""
        while len(self._trials) < number:
            self._replay(self._records[len(self._trials)])
        if len(self._trials) > number:
            raise ValueError(f"trial {number} has been asked for already")

    def _replay(self, record: TrialRecord) -> None:
        """Adds a trial that was asked for earlier to Optuna's study."""
        known = {path: self._distributions[path] for path in self._distributions if path in record.coordinates}
        trial = self._ask(_Replay(record.coordinates), known)
        for key, value in self._attributes(record).items():
            self._storage.set_trial_system_attr(self._id(trial), key, value)
        for key, value in self._kept(record.study_attrs).items():
            self._storage.set_study_system_attr(self._study_id, key, value)
        self._enter(trial, record)

    def _ask(self, sampler: BaseSampler, distributions: Mapping[str, BaseDistribution]) -> optuna.Trial:
        self._study.sampler = sampler
        self._trials.append(self._study.ask(dict(distributions)))
        return self._trials[-1]

    def _attributes(self, record: TrialRecord) -> dict[str, Any]:
        """Returns Optuna's system attributes for a trial that was asked for earlier."""
        return self._kept(record.trial_attrs)

    def _study_attributes(self) -> dict[str, Any]:
        return self._kept(self._storage.get_study_system_attrs(self._study_id))

    def _kept(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in attributes.items() if key.startswith(self.KEEPS)} if self.KEEPS else {}


def _constraints(record: TrialRecord) -> dict[str, float]:
    """Returns the violations in Optuna's form: by name, the same names for each trial, none of them NaN."""
    return {str(i): violation for i, violation in enumerate(record.violations)}


def fail(study: optuna.Study, trial: optuna.Trial) -> None:
    """Ends a trial as failed, so that no model uses it."""
    study.tell(trial, state=TrialState.FAIL)
