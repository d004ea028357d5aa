"""TPE (Bergstra et al. 2011; multivariate, Falkner et al. 2018), Optuna's, kept in step with the ledger.

Optuna is a library here: an in-memory study mirrors the trials told and open, and every ask gets a fresh
`TPESampler` with a seed of its own, so nothing of a sampler has to survive a restart.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from hpo.ledger.tables import OPEN_STATES
from hpo.objective import Objective
from hpo.search.sampler import Proposal, TrialRecord, ask_seed, is_scored

if TYPE_CHECKING:
    from hpo.space import Coordinate, Space


def distribution(coordinate: Coordinate) -> BaseDistribution:
    """Optuna's distribution of a coordinate."""
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


def quiet_study(directions: Sequence[Literal["minimize", "maximize"]], name: str | None = None) -> optuna.Study:
    """A new study in memory, without the line that Optuna logs about it."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(directions=directions, study_name=name)
    finally:
        optuna.logging.set_verbosity(verbosity)


class _Replay(BaseSampler):
    """Draws what an earlier ask has drawn."""

    def __init__(self, coordinates: Mapping[str, Any]) -> None:
        self._coordinates = coordinates

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._coordinates[param_name]


class Tpe:
    """How trials enter the model.

    complete     by their values
    pruned       as PRUNED with their last value: ranked behind the complete ones, by how far they came, then by value
    paused       like pruned, at the rung they wait at
    infeasible   as violating a constraint: behind every feasible one, and never the best
    failed       not at all
    running      as if they had gone badly ("constant liar"), which keeps proposals apart

    A trial that lacks coordinates enters with those it has; what it lacks Optuna then models by itself, apart from the
    other dimensions. Optuna numbers trials as they come; they enter its study in number order, at the first ask that
    needs them. Its system attributes repeat the coordinates of a running trial, so none are kept.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, n_startup_trials: int = 10) -> None:
        self._seed, self._startup = seed, n_startup_trials
        self._directions: list[Literal["minimize", "maximize"]] = [objective.direction for objective in objectives]
        self._distributions = {path: distribution(seen) for path, seen in space.coordinates.items()}
        self._records: dict[int, TrialRecord] = {}
        self._clear()

    def _clear(self) -> None:
        """Forget Optuna's study; the next ask fills a new one from the records."""
        self._study = quiet_study(self._directions)
        self._trials: list[optuna.Trial] = []

    def adopt(self, record: TrialRecord) -> None:
        self._take(record)

    def tell(self, record: TrialRecord) -> None:
        self._take(record)

    def _take(self, record: TrialRecord) -> None:
        before, self._records[record.number] = self._records.get(record.number), record
        if before is None or record.number >= len(self._trials):
            return
        if before.state in OPEN_STATES and before.state != "paused":
            self._enter(self._trials[record.number], record)
        else:
            self._clear()  # what has ended in Optuna's study, as a paused trial has, cannot go on there

    def ask(self, number: int) -> Proposal:
        while len(self._trials) < number:
            record = self._records[len(self._trials)]
            self._trials.append(self._ask(_Replay(record.coordinates), record.coordinates))
            self._enter(self._trials[-1], record)
        if len(self._trials) > number:
            raise ValueError(f"trial {number} has been asked for already")
        seed = ask_seed(self._seed, number)
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=self._startup)
        self._trials.append(trial := self._ask(sampler, self._distributions))
        coordinates = {path: trial.params[path] for path in self._distributions}
        self._records[number] = TrialRecord(number, "running", coordinates)
        return Proposal(coordinates, seed)

    def exhausted(self, number: int) -> bool:
        return False

    def _ask(self, sampler: BaseSampler, paths: Container[str]) -> optuna.Trial:
        self._study.sampler = sampler
        return self._study.ask({path: one for path, one in self._distributions.items() if path in paths})

    def _enter(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Let a running trial of Optuna's study end as its record says."""
        if record.state in OPEN_STATES and record.state != "paused":
            return
        if record.state == "failed":
            self._study.tell(trial, state=TrialState.FAIL)
        elif record.state == "complete" and is_scored(record):
            self._study.tell(trial, [value for value in record.values or () if value is not None])
        else:
            if record.state not in ("pruned", "paused"):
                trial.set_constraint("feasible", 1.0)
            if record.curve and len(self._directions) == 1:
                epoch, value = record.curve[-1]
                trial.report(value, epoch)
            self._study.tell(trial, state=TrialState.PRUNED)
