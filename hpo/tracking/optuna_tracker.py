"""Optuna's storage as a tracker, for optuna-dashboard: a study per study, a trial of the same number per trial.

It is a SQLite file of its own in the home. What Optuna has a place for is kept: parameters with their distributions,
the objective's values by epoch, states, times, constraints and the last value of each metric. Artifacts and models are
not. Facts behind the choices here, of Optuna 5.0: a trial's number is the count of those before it, so waiting trials
fill the gaps; a finished trial never changes again, not even its attributes; a trial cannot be deleted, so what has to
go takes its study along, and the mirror makes that anew; times are those of the call, and are set right afterwards.
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import HpoError
from hpo.ledger.sqlite_url import url_of
from hpo.ledger.store import DATABASE_ERRORS
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.tracking import damage
from hpo.tracking.base import Batch, ModelView, Point, Refused, Run, RunView, Unreachable
from hpo.tracking.mlflow_store import locked
from hpo.tracking.names import entry_name
from hpo.tracking.trackers import OPTUNA
from hpo.tracking.uri import tracker_name

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

_UID, _TOKEN, _TAGS, _EPOCHS = "hpo:uid", "hpo:token", "hpo:tags", "hpo:epochs"
_SHOWN = ("state", "outcome", "error", "config_hash")  # user attributes, of the tags of these names
_TIMES = "UPDATE trials SET datetime_start = ?, datetime_complete = ? WHERE trial_id = ?"

# The ledger's states as Optuna's. It knows no pause: such a trial is not over. One that broke a constraint is
# complete where it has values, and has the constraint in any case.
STATES = {
    "waiting": "WAITING",
    "running": "RUNNING",
    "paused": "RUNNING",
    "complete": "COMPLETE",
    "pruned": "PRUNED",
    "infeasible": "PRUNED",
    "failed": "FAIL",
}


@dataclass(frozen=True)
class Searched:
    """What a study declares, as far as Optuna wants to know: the objectives' metrics and directions, and the space."""

    metrics: Sequence[str]
    directions: Sequence[str]
    dimensions: Mapping[str, Dimension]


def value_distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's distribution of a dimension's values, as a plot's axis wants it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Float):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
    if isinstance(dimension, Int):
        log = dimension.log or dimension.powers_of_two
        return IntDistribution(dimension.low, dimension.high, log=log, step=dimension.step)
    assert isinstance(dimension, Choice)
    return CategoricalDistribution(
        [json.dumps(option) if isinstance(option, list | tuple | dict) else option for option in dimension.options]
    )


class OptunaTracker:
    """A tracker in the SQLite file `file`, which is made where it is missing. `searched` gives what a study declares.

    A run's id is the study's token, and for a trial `<token>/<number>`. Raises Unreachable where the file cannot be
    used.
    """

    keeps_files = False

    def __init__(self, file: Path, searched: Callable[[str], Searched]) -> None:
        self.name = tracker_name(OPTUNA + url_of(file))
        self._searched = searched
        with self._speaking():
            self._storage = _opened(file)
        weakref.finalize(self, self._storage.engine.dispose).atexit = False  # as a Ledger's

    @property
    def storage(self) -> RDBStorage:
        """For whoever shows it."""
        return self._storage

    def open_study(self, study: str, run: Run) -> str:
        from optuna.study import StudyDirection

        declared, token = self._searched(study), secrets.token_hex(8)
        with self._speaking():
            if (other := self._study_id(study)) is not None:  # which was removed, or whose trials were set aside
                self._storage.delete_study(other)
            directions = [StudyDirection[direction.upper()] for direction in declared.directions]
            study_id = self._storage.create_new_study(directions, study)
            self._storage.set_study_user_attr(study_id, "metrics", [*declared.metrics])
            self._storage.set_study_system_attr(study_id, "study:metric_names", [*declared.metrics])
            self._storage.set_study_system_attr(study_id, _TOKEN, token)
            self._storage.set_study_system_attr(study_id, _UID, run.uid)  # last: without it the study is none of ours
        return token

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        """Optuna's studies say nothing of themselves."""

    def open_trial(self, parent: str, run: Run) -> str:
        from optuna.trial import TrialState, create_trial

        number = int(run.uid.rpartition("/")[2])
        with self._speaking():
            study_id = self._of_token(parent)
            while self._storage.get_n_trials(study_id) <= number:
                self._storage.create_new_trial(study_id, create_trial(state=TrialState.WAITING))
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
            tags = {**run.tags, "hpo.run_uid": run.uid, "hpo.started_at": str(run.started_at)}
            self._storage.set_trial_system_attr(trial_id, _TAGS, tags)
        return f"{parent}/{number}"

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        with self._speaking():
            study_id = self._study_id(study)
            known = {} if study_id is None else self._storage.get_study_system_attrs(study_id)
            if study_id is None or known.get(_UID) != uid:
                return []
            if not children:
                return [RunView(known[_TOKEN], uid, "", None, {}, {}, frozenset())]
            trials = self._storage.get_all_trials(study_id, deepcopy=False)
            return [_view(known[_TOKEN], trial) for trial in trials if _TAGS in trial.system_attrs]

    def send(self, run_id: str, batch: Batch) -> None:
        token, _, number = run_id.partition("/")
        with self._speaking():
            study_id = self._of_token(token)
            if not number:
                return
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, int(number))
            trial = self._storage.get_trial(trial_id)
            tags = trial.system_attrs[_TAGS] | dict(batch.tags)
            tags = {key: value for key, value in tags.items() if key not in batch.removed_tags}
            if not trial.state.is_finished():
                declared = self._searched(self._storage.get_study_name_from_id(study_id))
                self._set_params(trial, declared, batch.params)
                self._set_points(trial, declared, batch.points)
                self._set_attributes(trial, tags, batch)
                complete = tags["hpo.state"] == "infeasible" and batch.values
                self._set_state(trial, "COMPLETE" if complete else STATES[tags["hpo.state"]], batch)
            if tags["hpo.state"] != "waiting":
                self._set_times(trial_id, int(tags["hpo.started_at"]), batch.ended_at)

    def discard(self, run_id: str) -> None:
        with self._speaking():
            for study in self._storage.get_all_studies():
                if study.system_attrs.get(_TOKEN) == run_id.partition("/")[0]:
                    self._storage.delete_study(study._study_id)

    def remove(self, study: str, uid: str) -> None:
        for view in self.find(study, uid):
            self.discard(view.run_id)

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        """The objective's values, at the epochs that stand for Optuna's steps; Optuna keeps no times of theirs."""
        for run in runs:
            token, _, number = run.run_id.partition("/")
            with self._speaking():
                study_id = self._of_token(token)
                trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, int(number))
                values = self._storage.get_trial(trial_id).intermediate_values
                [metric, *_] = self._storage.get_study_user_attrs(study_id)["metrics"]
            yield from ((run.run_id, Point(metric, epoch, 0, value)) for epoch, value in values.items())

    def digests(self, run_id: str) -> dict[str, str]:
        """Optuna keeps no files."""
        return {}

    def models(self, study: str) -> list[ModelView]:
        """Optuna keeps no models."""
        return []

    def model_digests(self, model_id: str) -> dict[str, str]:
        return {}

    def flush(self) -> None:
        """SQLite has each of Optuna's transactions on the disk."""

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _study_id(self, study: str) -> int | None:
        try:
            return self._storage.get_study_id_from_name(study)
        except KeyError:
            return None

    def _of_token(self, token: str) -> int:
        for study in self._storage.get_all_studies():
            if study.system_attrs.get(_TOKEN) == token:
                return study._study_id
        raise Refused(f"the study of run {token} was deleted in {self.name}.")

    def _set_params(self, trial: FrozenTrial, declared: Searched, params: Mapping[str, str]) -> None:
        paths = {entry_name(path): path for path in declared.dimensions}
        for name, text in params.items():
            if (path := paths.get(name, name)) in trial.params:
                continue
            if path not in declared.dimensions:
                raise Refused(f"{path}={text} is nothing that the declared space searches.")
            distribution = value_distribution(declared.dimensions[path])
            try:
                internal = distribution.to_internal_repr(_value(declared.dimensions[path], text))
                self._storage.set_trial_param(trial._trial_id, path, internal, distribution)
            except ValueError as error:  # the space has changed since the trial was asked for
                raise Refused(f"{path}={text} does not fit the declared space: {error}") from error

    def _set_points(self, trial: FrozenTrial, declared: Searched, points: Sequence[Point]) -> None:
        """The objective's values by epoch, and the last value of each metric."""
        closed = {str(point.step): int(point.value) for point in points if point.key == "epoch"}
        epochs = trial.system_attrs.get(_EPOCHS, {}) | closed
        if closed:
            self._storage.set_trial_system_attr(trial._trial_id, _EPOCHS, epochs)
        own = [point for point in points if point.key != "epoch" and not _of_the_end(point.key)]
        for point in own:
            if [point.key] == [*map(entry_name, declared.metrics)] and str(point.step) in epochs:
                epoch = epochs[str(point.step)]
                self._storage.set_trial_intermediate_value(trial._trial_id, epoch, point.value)
        for key, value in {point.key: point.value for point in sorted(own, key=lambda point: point.step)}.items():
            self._storage.set_trial_user_attr(trial._trial_id, key, value)

    def _set_attributes(self, trial: FrozenTrial, tags: Mapping[str, str], batch: Batch) -> None:
        broken = {"feasible": 1.0} if tags["hpo.state"] == "infeasible" else {}
        for name, value in (batch.violations or broken).items():
            self._storage.set_trial_system_attr(trial._trial_id, f"constraints:{name}", value)
        for name in _SHOWN:
            self._storage.set_trial_user_attr(trial._trial_id, name, tags.get(f"hpo.{name}"))
        self._storage.set_trial_system_attr(trial._trial_id, _TAGS, dict(tags))

    def _set_state(self, trial: FrozenTrial, name: str, batch: Batch) -> None:
        from optuna.trial import TrialState

        state = TrialState[name]
        if state.is_finished() or state is not trial.state:
            self._storage.set_trial_state_values(trial._trial_id, state, batch.values or None)

    def _set_times(self, trial_id: int, started: int, ended: int | None) -> None:
        times = [None if at is None else _stamp(at) for at in (started, ended)]
        with self._storage.engine.begin() as connection:
            connection.exec_driver_sql(_TIMES, (*times, trial_id))

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Turn what Optuna and the disk raise into Unreachable or Refused, in one sentence."""
        from optuna.exceptions import OptunaError

        try:
            yield
        except HpoError:
            raise
        except KeyError as error:
            raise Refused(f"{self.name} has lost it: {error}.") from error
        except (OptunaError, *DATABASE_ERRORS, OSError) as error:
            text = " ".join(str(error).split())[:300]
            damaged = damage.of_error(self.name.removeprefix(OPTUNA), text, damage.OPTUNA)
            raise Unreachable(damaged or f"Optuna's storage {self.name} cannot be used now: {text}") from error


def _opened(file: Path) -> RDBStorage:
    """The storage, its tables made by one process at a time."""
    from optuna.storages import RDBStorage

    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{file}.lock")):
        storage = RDBStorage(url_of(file), engine_kwargs={"connect_args": {"timeout": 30}})
        with storage.engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")  # the pages read while the mirror writes
        os.chmod(file, 0o600 & ~os.umask(os.umask(0)))
    return storage


def _view(token: str, trial: FrozenTrial) -> RunView:
    tags = trial.system_attrs[_TAGS]
    ended = trial.datetime_complete
    at = None if ended is None else round(ended.timestamp() * 1000)
    return RunView(f"{token}/{trial.number}", tags["hpo.run_uid"], trial.state.name, at, tags, {}, frozenset())


def _value(dimension: Dimension, text: str) -> Any:
    """The value of a dimension that was written as `text`: a text as it is, anything else as Python writes it."""
    if isinstance(dimension, Float):
        return float(text)
    if isinstance(dimension, Int):
        return int(text)
    assert isinstance(dimension, Choice)
    for option in dimension.options:
        plain = list(option) if isinstance(option, tuple) else option
        if text in (plain if isinstance(plain, str) else repr(plain), repr(option)):
            return json.dumps(plain) if isinstance(plain, list | dict) else plain
    raise ValueError(f"it is none of {dimension.options}")


def _of_the_end(key: str) -> bool:
    """Whether the projection adds it for MLflow's pages, which sort by it."""
    return key == "objective" or key.startswith("objective/")


def _stamp(milliseconds: int) -> str:
    """As SQLAlchemy writes times into SQLite, and Optuna means them: of the local clock."""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M:%S.%f")
