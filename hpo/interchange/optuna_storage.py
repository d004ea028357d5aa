"""Reads a study of Optuna's, from a database or a journal, and writes one of this platform's as one of Optuna's.

Nothing is written where it is read: a database file is opened for reading alone.
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

from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State
from hpo.ledger.json import plain
from hpo.ledger.other_database import is_of_another
from hpo.ledger.sqlite_url import path_of
from hpo.ledger.store import DATABASE_ERRORS, read_only
from hpo.search.samplers.optuna_sampler import quiet_optuna
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.objective import Objective
from hpo.text import counted, near
from trainer.redaction import redacted_url

_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_SQLITE = b"SQLite format 3\0"
_UNREADABLE = (*DATABASE_ERRORS, OptunaError, RuntimeError, ValueError, KeyError, OSError, ImportError)


def read(url: str, study: str | None, metrics: Sequence[str] = (), directions: Sequence[str] = ()) -> ImportedStudy:
    """The study of that name, or the only one, of the storage at `url`: sqlite:///PATH, another database, or the path
    of a database file or a journal.

    `metrics` names what the values are of, where the study does not say. Raises UserError.
    """
    shown = redacted_url(url)
    if directions:
        raise UserError("--direction: a study of Optuna's has its directions: leave the option out.")
    with quiet_optuna():
        try:
            with _closed(_opened(url, shown)) as storage:
                name = _chosen(storage, study, shown)
                stored = optuna.load_study(study_name=name, storage=storage)
                trials, attributes = stored.get_trials(deepcopy=False), stored.user_attrs
                stored_directions, called = stored.directions, stored.metric_names
        except _UNREADABLE as error:
            raise _refusal(error, shown) from error
    names = _metrics(len(stored_directions), called, metrics, shown)
    objectives = tuple(
        Objective(metric, "maximize" if direction is StudyDirection.MAXIMIZE else "minimize")
        for metric, direction in zip(names, stored_directions, strict=True)
    )
    ended = [trial for trial in trials if trial.state in _STATES]
    open_ = Counter(trial.state.name for trial in trials if trial.state not in _STATES)
    left = [f"{counted(count, 'trial')} in state {state}, which may end yet" for state, count in open_.items()]
    return ImportedStudy(
        "optuna",
        name,
        shown,
        objectives,
        [_trial(trial, names) for trial in ended],
        attributes,
        [*left, *_unstepped(ended)],
        [] if metrics or called else [f"its values are called {', '.join(names)} (--metric names them)"],
    )


def _opened(url: str, shown: str) -> BaseStorage:
    path = path_of(url) if url.startswith("sqlite") else None if "://" in url else Path(url).expanduser()
    if path is None:
        return RDBStorage(url, skip_table_creation=True)
    if not path.is_file():
        raise UserError(f"{shown}: there is no file {path}: name a storage of Optuna's, such as sqlite:///study.db.")
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
    names = sorted(one.study_name for one in storage.get_all_studies())
    if study is not None and study not in names:
        there = f"it has {', '.join(names)}" if names else "it has none"
        raise UserError(f"{shown} has no study {study!r} ({there}){near(study, names) or ': name one with --study.'}")
    if study is None and len(names) != 1:
        there = f"holds {', '.join(names)}" if names else "holds no study"
        raise UserError(f"{shown} {there}: name one with --study.")
    return study or names[0]


def _refusal(error: Exception, shown: str) -> UserError:
    if isinstance(error, UserError):
        return error
    cause = error.__cause__ if isinstance(error, OptunaError) and error.__cause__ else error
    said = " ".join(str(getattr(cause, "orig", None) or cause).split()).rstrip(".")
    if isinstance(error, RuntimeError) and "storage upgrade" in said:
        url = shown if "://" in shown else f"sqlite:///{shown}"
        return UserError(
            f"{shown} was written by an older release of Optuna: back it up, then "
            f"`optuna storage upgrade --storage {url}` brings it to this one ({optuna.__version__})."
        )
    return UserError(f"{shown} cannot be read as a storage of Optuna's ({said}): name another, or restore it.")


def _metrics(count: int, called: Sequence[str] | None, given: Sequence[str], shown: str) -> list[str]:
    if given and len(given) != count:
        raise UserError(f"--metric: {shown} has {counted(count, 'objective')}, and {len(given)} are named: name each.")
    return list(given or called or numbered(count))


def numbered(count: int) -> list[str]:
    """What the values of a study without names are called, as in Optuna's own tables."""
    return ["value"] if count == 1 else [f"value_{n}" for n in range(count)]


def _unstepped(trials: Sequence[FrozenTrial]) -> list[str]:
    from hpo.interchange.rows import MAX_STEP

    count = sum(not 0 <= step < MAX_STEP for trial in trials for step in trial.intermediate_values)
    return [f"{counted(count, 'value')} at steps that are not from 0 to 2**31"] if count else []


def _trial(trial: FrozenTrial, metrics: Sequence[str]) -> ImportedTrial:
    """What `restored` needs beside what everything reads is kept as `exact`."""
    dimensions = {name: dimension(one) for name, one in trial.distributions.items()}
    params = {name: _value(dimensions[name], value) for name, value in trial.params.items()}
    odd = {name: value for name, value in trial.params.items() if params[name] != value}
    exact = {"state": trial.state.name, "values": trial.values, "params": odd, "system_attrs": trial.system_attrs}
    exact["distributions"] = {name: distribution_to_json(one) for name, one in trial.distributions.items()}
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
    """The value as JSON, and on a step, such as 0.3 for the 0.1 + 2 * 0.1 of floats."""
    if isinstance(dimension, Float) and dimension.step is not None:
        return dimension.value(value) if math.isclose(dimension.value(value), value) else value
    return plain(value)


def dimension(one: BaseDistribution) -> Dimension:
    """A distribution of Optuna's as a dimension."""
    if isinstance(one, FloatDistribution):
        return Float(one.low, one.high, log=one.log, step=one.step)
    if isinstance(one, IntDistribution):
        return Int(one.low, one.high, log=one.log, step=one.step)
    assert isinstance(one, CategoricalDistribution)
    return Choice([plain(choice) for choice in one.choices])


def write(study: optuna.Study, url: str, name: str) -> int:
    """Add a study with all its trials to the storage at `url`, sqlite:///PATH or another database; how many trials.

    Raises UserError where one of that name is there, or the storage cannot be used. What was begun is taken back.
    """
    shown = redacted_url(url)
    with quiet_optuna(), ExitStack() as opened:
        try:
            if is_of_another(url, "study_directions"):
                raise UserError(f"{shown} is the database of another program: name one of Optuna's, or a new file.")
            storage = opened.enter_context(_closed(RDBStorage(url)))
            made = optuna.create_study(directions=study.directions, storage=storage, study_name=name)
        except DuplicatedStudyError as error:
            raise UserError(f"{shown} has a study {name!r} already: name another with --name.") from error
        except _UNREADABLE as error:
            raise _refusal(error, shown) from error
        try:
            for key, value in study.user_attrs.items():
                if key != "metrics":
                    made.set_user_attr(key, value)
            names = study.user_attrs["metrics"]
            if names != numbered(len(names)):
                made.set_metric_names(names)
            made.add_trials(study.get_trials(deepcopy=False))
        except BaseException:
            optuna.delete_study(study_name=name, storage=storage)
            raise
    return len(study.trials)
