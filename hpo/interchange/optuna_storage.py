"""Reads an Optuna study from a database or a journal, and writes a study of this platform as an Optuna study.

Reading writes nothing: a database file is opened read-only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.exceptions import DuplicatedStudyError, OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.analysis.plots.optuna_study import fill, numbered
from hpo.door import option
from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State
from hpo.ledger.database.faults import DATABASE_ERRORS
from hpo.ledger.database.json import plain
from hpo.ledger.database.other_database import is_of_another
from hpo.ledger.database.sqlite_url import path_of
from hpo.ledger.database.store import read_only
from hpo.ledger.process_id import Process, is_dead
from hpo.search.samplers.optuna_sampler import quiet_optuna
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.objective import Objective
from hpo.text import counted, near
from trainer.quote import shortened
from trainer.redaction import redacted_url

_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_WRITER = "hpo.writer"  # a system attribute: host, pid and start of the writing process; None once the study is whole
_SQLITE = b"SQLite format 3\0"
_UNREADABLE = (*DATABASE_ERRORS, OptunaError, RuntimeError, ValueError, OSError, ImportError)  # they name the fault


def read(url: str, study: str | None, metrics: Sequence[str] = (), directions: Sequence[str] = ()) -> ImportedStudy:
    """Returns the study of that name, or the only one, in the storage at `url`.

    `url` is sqlite:///PATH, another database, or the path of a database file or a journal. `metrics` names the values
    if the study does not. Raises UserError.
    """
    shown = redacted_url(url)
    if directions:
        raise UserError(f"{option('direction')}: a study of Optuna's has its directions: leave the option out.")
    with quiet_optuna():
        try:
            with _closed(_opened(url, shown)) as storage:
                name = _chosen(storage, study, shown)
                stored = optuna.load_study(study_name=name, storage=storage)
                trials, attributes = stored.get_trials(deepcopy=False), stored.user_attrs
                stored_directions, called = stored.directions, stored.metric_names
                names = _metrics(len(stored_directions), called, metrics, shown)
                ended_trials = [trial for trial in trials if trial.state in _STATES]
                carried = [_trial(trial, names) for trial in ended_trials]
        except Exception as error:  # a damaged row or line may make Optuna raise anything
            raise _refusal(error, shown) from error
    objectives = tuple(
        Objective(metric, "maximize" if direction is StudyDirection.MAXIMIZE else "minimize")
        for metric, direction in zip(names, stored_directions, strict=True)
    )
    open_ = Counter(trial.state.name for trial in trials if trial.state not in _STATES)
    left = [f"{counted(count, 'trial')} in state {state}, which may end yet" for state, count in open_.items()]
    left += _unstepped(ended_trials)
    guessed = [] if metrics or called else [f"its values are called {', '.join(names)} ({option('metric')} names them)"]
    return ImportedStudy("optuna", name, shown, objectives, carried, attributes, left, guessed)


def _opened(url: str, shown: str) -> BaseStorage:
    path = path_of(url) if url.startswith("sqlite") else None if "://" in url else Path(url).expanduser()
    if path is None:
        return RDBStorage(url, skip_table_creation=True)
    if not path.is_file():
        raise UserError(f"{shown}: file {path} does not exist: name a storage of Optuna's, such as sqlite:///study.db.")
    with path.open("rb") as file:
        begin = file.read(len(_SQLITE))
    if begin == _SQLITE:
        return RDBStorage(read_only(f"sqlite:///{path.absolute()}", path), skip_table_creation=True)
    if url.startswith("sqlite") or not begin.startswith(b"{"):
        raise UserError(f"{path} is neither a database of SQLite nor a journal of Optuna's: name another file.")
    return JournalStorage(JournalFileBackend(str(path)))


@contextmanager
def _closed(storage: BaseStorage) -> Generator[BaseStorage]:
    """Closes the connections of a storage at the end of the block."""
    try:
        yield storage
    finally:
        if isinstance(storage, RDBStorage):
            storage.engine.dispose()


def _chosen(storage: BaseStorage, study: str | None, shown: str) -> str:
    names = sorted(summary.study_name for summary in storage.get_all_studies())
    if study is not None and study not in names:
        contents = f"it has {', '.join(names)}" if names else "it has none"
        fix = near(study, names) or f": name one with {option('study')}."
        raise UserError(f"{shown} has no study {study!r} ({contents}){fix}")
    if study is None and len(names) != 1:
        contents = f"holds {', '.join(names)}" if names else "holds no study"
        raise UserError(f"{shown} {contents}: name one with {option('study')}.")
    return study or names[0]


def _refusal(error: Exception, shown: str) -> UserError:
    if isinstance(error, UserError):
        return error
    cause = error.__cause__ if isinstance(error, OptunaError) and error.__cause__ else error
    reason = " ".join(str(getattr(cause, "orig", None) or cause).split()).rstrip(".")
    reason = shortened(reason if isinstance(cause, _UNREADABLE) else f"{type(cause).__name__}: {reason}")
    if isinstance(error, RuntimeError) and "storage upgrade" in reason:
        url = shown if "://" in shown else f"sqlite:///{shown}"
        return UserError(
            f"{shown} was written by an older release of Optuna: back it up, then "
            f"`optuna storage upgrade --storage {url}` brings it to this one ({optuna.__version__})."
        )
    return UserError(f"{shown} cannot be read as a storage of Optuna's ({reason}): name another, or restore it.")


def _metrics(count: int, called: Sequence[str] | None, given: Sequence[str], shown: str) -> list[str]:
    if given and len(given) != count:
        raise UserError(
            f"{option('metric')}: {shown} has {counted(count, 'objective')}, and {len(given)} are named: name each."
        )
    return [str(name) for name in given or called or numbered(count)]


def _unstepped(trials: Sequence[FrozenTrial]) -> list[str]:
    from hpo.interchange.rows import MAX_STEP

    count = sum(not 0 <= step < MAX_STEP for trial in trials for step in trial.intermediate_values)
    return [f"{counted(count, 'value')} at steps that are not from 0 to 2**31"] if count else []


def _trial(trial: FrozenTrial, metrics: Sequence[str]) -> ImportedTrial:
    """Returns the trial; `exact` keeps what only `restored` needs."""
    dimensions = {name: dimension(distribution) for name, distribution in trial.distributions.items()}
    params = {name: _value(dimensions[name], value) for name, value in trial.params.items()}
    odd = {name: value for name, value in trial.params.items() if params[name] != value}
    exact = {"state": trial.state.name, "values": trial.values, "params": odd, "system_attrs": trial.system_attrs}
    exact["distributions"] = {
        name: distribution_to_json(distribution) for name, distribution in trial.distributions.items()
    }
    start, end = trial.datetime_start, trial.datetime_complete
    points = [Point(step, value) for step, value in sorted(trial.intermediate_values.items())]
    return ImportedTrial(
        key=f"{trial.number} {start.isoformat() if start else ''}".strip(),
        state=_STATES[trial.state],
        params=params,
        values=trial.values,
        dimensions=dimensions,
        curves={metrics[0]: points} if points else {},
        constraints={f"constraint/{name}": value for name, value in trial.constraints.items()},
        started=start.timestamp() if start else None,
        ended=end.timestamp() if end else None,
        error=str(trial.system_attrs.get("fail_reason", "")),
        attributes=trial.user_attrs,
        exact=exact,
    )


def _value(dimension: Dimension, value: Any) -> Any:
    """Returns the value as JSON, rounded to its step: 0.3 for the 0.1 + 2 * 0.1 of floats."""
    if isinstance(dimension, Float) and dimension.step is not None:
        return dimension.value(value) if math.isclose(dimension.value(value), value) else value
    return plain(value)


def dimension(one: BaseDistribution) -> Dimension:
    """Returns an Optuna distribution as a dimension."""
    if isinstance(one, FloatDistribution):
        return Float(one.low, one.high, log=one.log, step=one.step)
    if isinstance(one, IntDistribution):
        return Int(one.low, one.high, log=one.log, step=one.step)
    assert isinstance(one, CategoricalDistribution)
    return Choice([plain(choice) for choice in one.choices])


def write(study: optuna.Study, url: str, name: str) -> int:
    """Adds a study with all its trials to the storage at `url` and returns the number of trials.

    `url` is sqlite:///PATH or another database. Raises UserError if a study of that name exists or the storage cannot
    be used. A failed write is undone; if this process is killed, the next call undoes it. Until a study is whole, an
    attribute names the process that writes it.
    """
    shown = redacted_url(url)
    with quiet_optuna(), ExitStack() as opened:
        try:
            if is_of_another(url, "study_directions"):
                raise UserError(f"{shown} is the database of another program: name one of Optuna's, or a new file.")
            storage = opened.enter_context(_closed(RDBStorage(url)))
            _take_back(storage, name, shown)
            copy = optuna.create_study(directions=study.directions, storage=storage, study_name=name)
        except DuplicatedStudyError as error:
            raise UserError(f"{shown} has a study {name!r} already: name another with {option('name')}.") from error
        except UserError:
            raise
        except (*_UNREADABLE, KeyError) as error:
            raise _refusal(error, shown) from error
        try:
            process, study_id = Process.current(), storage.get_study_id_from_name(name)
            storage.set_study_system_attr(study_id, _WRITER, [process.host, process.pid, process.started])
            fill(copy, study)
            storage.set_study_system_attr(study_id, _WRITER, None)
        except BaseException:
            optuna.delete_study(study_name=name, storage=storage)
            raise
    return len(study.trials)


def _take_back(storage: BaseStorage, name: str, shown: str) -> None:
    """Deletes the study that a killed export left under this name. Raises UserError if its writer may still be
    alive."""
    if name not in optuna.get_all_study_names(storage):
        return
    study_id = storage.get_study_id_from_name(name)
    writer = storage.get_study_system_attrs(study_id).get(_WRITER)
    if writer is None:
        if storage.get_study_user_attrs(study_id) or storage.get_all_trials(study_id, deepcopy=False):
            return  # it is whole, or not from an export
    elif not is_dead(*writer):
        host, pid, _ = writer
        raise UserError(f"{shown}: study {name!r} is being written by pid {pid} on {host}: wait, or name another.")
    optuna.delete_study(study_name=name, storage=storage)
