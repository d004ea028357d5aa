"""Queries a study's progress: the trials that are new or were open, and what happened to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, case, exists, false, func, select, union_all

from hpo.ledger.database.tables import asks, attempts, decisions, events, leases, reports, trials
from hpo.ledger.read import every
from hpo.ledger.removed import is_removed
from hpo.ledger.rows import Connection, ProgressRow

_LAST = (reports.c.trial_id == trials.c.id) & (reports.c.step == trials.c.step) & (reports.c.epoch == trials.c.epoch)
_JUDGED = select(func.count()).where(_LAST, reports.c.fold == 0, reports.c.key.in_(bindparam("judged", expanding=True)))
_ANSWERED = exists().where(decisions.c.trial_id == trials.c.id, decisions.c.step == trials.c.step)
_CLOSED = _JUDGED.scalar_subquery() == bindparam("all_judged")
_UNDECIDED = case((trials.c.state == "running", _CLOSED & ~_ANSWERED), else_=false())


def _those(which: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    return (
        select(
            trials.c.number,
            trials.c.state,
            trials.c.epoch,
            trials.c.from_epoch,
            trials.c.parent,
            trials.c["values"].label("objectives"),
            trials.c.error,
            _UNDECIDED.label("undecided"),
            is_removed.label("removed"),
            asks.c.params,
            asks.c.config[("train", "num_epochs")].as_integer().label("num_epochs"),
            asks.c.config[("train", "folds")].as_integer().label("folds"),
            asks.c.config[("train", "seeds")].as_integer().label("seeds"),
        )
        .join(asks, asks.c.trial_id == trials.c.id)
        .where(trials.c.study_id == bindparam("study"), which)
    )


# A union, since SQLite would look at every trial of the study for an OR.
_FRESH = union_all(
    _those(trials.c.number >= bindparam("first")),
    _those(trials.c.number.in_(bindparam("going", expanding=True))),
    _those(trials.c.number.in_(bindparam("paused", expanding=True)) & (trials.c.state != "paused")),
).order_by("number")

_REPORTED = (
    select(reports.c.key)
    .join(trials, trials.c.id == reports.c.trial_id)
    .where(trials.c.study_id == bindparam("study"), trials.c.number == bindparam("number"))
    .where(reports.c.fold == 0, reports.c.epoch.is_not(None))
    .distinct()
    .order_by(reports.c.key)
)

_BEFELL = (
    select(
        events.c.kind,
        func.count(events.c.trial_id.distinct()).label("trials"),
        func.min(trials.c.number).label("first"),
        func.min(events.c.fields["reason"].as_string()).label("reason"),
    )
    .join(trials, trials.c.id == events.c.trial_id)
    .where(events.c.study_id == bindparam("study"), events.c.kind.in_(bindparam("kinds", expanding=True)))
    .where(trials.c.state.not_in(("failed", "infeasible")))
    .group_by(events.c.kind)
)


_BEFORE = trials.c.ended_at < bindparam("at")
_CLOSED_BY_THEN = (
    select(func.max(reports.c.epoch))
    .where(reports.c.trial_id == trials.c.id, reports.c.at < bindparam("at"))
    .scalar_subquery()
)
_TRAINED_BY_THEN = func.coalesce(case((_BEFORE, trials.c.epoch), else_=_CLOSED_BY_THEN), trials.c.from_epoch)
_BY_THEN = select(
    func.count(case((_BEFORE, 1))).label("ended"),
    func.count(trials.c.parent).label("children"),
    func.coalesce(func.sum(_TRAINED_BY_THEN - trials.c.from_epoch), 0).label("epochs"),
).where(trials.c.study_id == bindparam("study"), trials.c.created_at < bindparam("at"))
_PAUSED_BY_THEN = (
    select(func.count())
    .select_from(trials)
    .join(attempts, (attempts.c.trial_id == trials.c.id) & (attempts.c.fence == trials.c.fence))
    .where(trials.c.study_id == bindparam("study"), trials.c.state == "paused", attempts.c.ended_at < bindparam("at"))
)
_DRIVEN_SINCE = select(leases.c.since).where(leases.c.name == bindparam("name"), leases.c.owner.is_not(None))


class Befallen(NamedTuple):
    """The number of trials with an event, the number of the first, and the reason, if any."""

    trials: int
    first: int
    reason: str | None


def fresh(
    connection: Connection,
    study_id: int,
    first: int,
    going: Collection[int],
    paused: Collection[int],
    metrics: Sequence[str],
) -> Sequence[ProgressRow]:
    """Returns the trials from number `first` on, those in `going`, and those in `paused` that are no longer paused, by
    number.

    Each has its parameters, its values as `objectives`, how many epochs, folds and seeds it is to train, and whether it
    is `undecided`: its last report has closed an epoch with all of `metrics`, and no decision answers it.
    """
    where = {"study": study_id, "first": first, "going": list(going), "paused": list(paused)}
    where |= {"judged": list(metrics), "all_judged": len(metrics)}
    return every(ProgressRow, connection.execute(_FRESH, where))


def closed_with(connection: Connection, study_id: int, number: int) -> Sequence[str]:
    """Returns the metrics that a trial has closed an epoch with (fold 0)."""
    return connection.execute(_REPORTED, {"study": study_id, "number": number}).scalars().all()


def befell(connection: Connection, study_id: int, kinds: Sequence[str]) -> dict[str, Befallen]:
    """Returns event kind -> the trials that had it and did not fail."""
    rows = connection.execute(_BEFELL, {"study": study_id, "kinds": list(kinds)})
    return {row.kind: Befallen(row.trials, row.first, row.reason) for row in rows}


def driven_since(connection: Connection, study_id: int) -> float | None:
    """Returns when the study's driver began, in seconds since 1970; None if nobody drives it."""
    return connection.execute(_DRIVEN_SINCE, {"name": f"driver:{study_id}"}).scalar_one_or_none()


class ByThen(NamedTuple):
    """Counts trials that had ended or are still paused, trials that continued another one, and epochs."""

    halted: int
    children: int
    epochs: int


def by_then(connection: Connection, study_id: int, at: float) -> ByThen:
    """Returns the counts of a study before the time `at`, in seconds since 1970."""
    row = connection.execute(_BY_THEN, {"study": study_id, "at": at}).one()
    paused = connection.execute(_PAUSED_BY_THEN, {"study": study_id, "at": at}).scalar_one()
    return ByThen(row.ended + paused, row.children, row.epochs)
