"""Queries for the live pages: changes of a study or a trial, curves over time, and a tracker's runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, select, union_all

from hpo.errors import UserError
from hpo.ledger.database.tables import mirrors, reports, trials
from hpo.ledger.names import machine_dependent
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import Connection, StudyRow
from hpo.text import near

_ASKED = 20  # trials that are searched for all metric names
_NAMED = 10

_OF_STUDY = trials.c.study_id == bindparam("study")


def _those(which: ColumnElement[bool]) -> Select[int, str, int]:
    return select(trials.c.number, trials.c.state, trials.c.revision).where(_OF_STUDY, which, is_shown)


# A union, since SQLite would look at every trial of the study for an OR.
_MOVED = union_all(
    _those(trials.c.number >= bindparam("first")),
    _those(trials.c.number.in_(bindparam("going", expanding=True))),
).order_by("number")
_KEYS = select(reports.c.key).where(reports.c.trial_id == bindparam("trial"), reports.c.fold == 0).distinct()
_REPORTED = (
    select(reports.c.trial_id)
    .join(trials, trials.c.id == reports.c.trial_id)
    .where(_OF_STUDY, reports.c.key == bindparam("key"))
    .limit(1)
)
_FIRST = select(trials.c.id).where(_OF_STUDY, trials.c.step > 0).order_by(trials.c.number).limit(bindparam("n"))
_POINTS = (
    select(
        trials.c.number,
        reports.c.key,
        reports.c.step,
        reports.c.epoch,
        reports.c.value,
        reports.c.at,
        trials.c.started_at,
    )
    .join(trials, trials.c.id == reports.c.trial_id)
    .where(_OF_STUDY, reports.c.fold == 0, trials.c.number.in_(bindparam("numbers", expanding=True)))
    .order_by(trials.c.number, reports.c.step, reports.c.key)
)
_RUNS = select(mirrors.c.tracker, mirrors.c.run_id).where(
    mirrors.c.study_id == bindparam("study"), mirrors.c.number == bindparam("number")
)


class Moved(NamedTuple):
    """A trial that may have changed, with the revision that identifies its content."""

    number: int
    state: str
    revision: int


class Point(NamedTuple):
    """A reported value of fold 0, and when it was reported: in seconds since the trial began, and since 1970."""

    number: int
    key: str
    step: int
    epoch: int | None
    value: float
    seconds: float
    at: float


def moved(connection: Connection, study_id: int, first: int, going: Collection[int]) -> list[Moved]:
    """Returns the trials from number `first` on, and those of `going`, by number; `going` is below `first`."""
    rows = connection.execute(_MOVED, {"study": study_id, "first": first, "going": list(going)})
    return [Moved(*row) for row in rows]


def reported(connection: Connection, study_id: int) -> list[str]:
    """Returns the metrics of the first twenty trials with a report, by name."""
    first = connection.execute(_FIRST, {"study": study_id, "n": _ASKED}).scalars().all()
    return sorted({key for trial in first for key in connection.execute(_KEYS, {"trial": trial}).scalars()})


def has_reported(connection: Connection, study_id: int, metric: str) -> bool:
    """Returns whether any trial of the study has reported this metric."""
    return connection.execute(_REPORTED, {"study": study_id, "key": metric}).first() is not None


def unreported(connection: Connection, study: StudyRow, metric: str) -> UserError:
    """Returns the error for a metric that no trial has reported, with the most similar names, or ten of all.

    Metrics of the machine are the last ones.
    """
    known = sorted(reported(connection, study.id), key=machine_dependent)
    listing = f": there are {', '.join(known[:_NAMED])}{' ...' * (len(known) > _NAMED)}." if known else " yet."
    return UserError(f"no trial of study {study.name!r} has reported {metric!r}{near(metric, known) or listing}")


def points(connection: Connection, study_id: int, numbers: Sequence[int], key: str | None = None) -> Iterator[Point]:
    """Yields the reported values of a metric, or of all, of these trials, by number and step."""
    query = _POINTS if key is None else _POINTS.where(reports.c.key == key)
    for number, name, step, epoch, value, at, began in connection.execute(
        query, {"study": study_id, "numbers": numbers}
    ):
        yield Point(number, name, step, epoch, math.nan if value is None else value, at - (began or at), at)


def runs(connection: Connection, study_id: int, number: int) -> dict[str, str]:
    """Returns tracker -> the run that it has of a trial; number -1 stands for the study itself."""
    return dict(map(tuple, connection.execute(_RUNS, {"study": study_id, "number": number})))
