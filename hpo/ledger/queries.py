"""Reads what the ledger holds about a study: counts, trials, curves, the digest. Read-only, torch-free."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from sqlalchemy import and_, bindparam, exists, func, select, tuple_
from sqlalchemy.engine import Connection, RowMapping

from hpo.errors import StudyError
from hpo.ledger import alert_queries, damage, tags
from hpo.ledger.alert_queries import Trouble
from hpo.ledger.leases import holder
from hpo.ledger.names import machine_dependent
from hpo.ledger.process_id import Process, is_dead
from hpo.ledger.tables import asks, attempts, events, reports, studies, trials, workers
from hpo.search.ranking import best_of, placed
from hpo.space.trial_state import STATES

_TRAINED = trials.c.epoch - trials.c.from_epoch
_NUMBERED = select(trials).where(
    trials.c.study_id == bindparam("study"), trials.c.number.in_(bindparam("numbers", expanding=True))
)


def study_row(connection: Connection, name: str) -> RowMapping:
    """The study's row; StudyError naming those there are if it is not among them."""
    row = find_study(connection, name)
    if row is None:
        names = study_names(connection)
        there = f"it holds {', '.join(names)}" if names else "it holds none yet"
        raise StudyError(
            f"no study {name!r} in this ledger ({there}): start it with `hpo run`, or name the right --home."
        )
    return row


def find_study(connection: Connection, name: str) -> RowMapping | None:
    """The study's row, if there is one of that name."""
    row = connection.execute(select(studies).where(studies.c.name == name)).mappings().first()
    if row is not None and damage.spec_fault(row["spec"]):
        raise ValueError(f"the specification of study {name!r} is damaged")  # the ledger says where, as of any value
    return row


def study_by_id(connection: Connection, study_id: int) -> RowMapping:
    """The row of a study that is there."""
    return connection.execute(select(studies).where(studies.c.id == study_id)).mappings().one()


def asked_for(connection: Connection, name: str | None = None) -> Sequence[RowMapping]:
    """The open studies that have trials, in the order in which they began; of them the one of that name, or all."""
    query = select(studies).where(studies.c.state == "open", exists().where(trials.c.study_id == studies.c.id))
    if name is not None:
        query = query.where(studies.c.name == name)
    return connection.execute(query.order_by(studies.c.id)).mappings().all()


def study_names(connection: Connection) -> list[str]:
    return list(connection.execute(select(studies.c.name).order_by(studies.c.id)).scalars())


def derived(connection: Connection) -> dict[str, str]:
    """Name -> the study whose configurations it trains again, of the studies that `confirm` and `ablate` have made."""
    of = studies.c.spec["listed_of"].as_string()
    rows = connection.execute(select(studies.c.name, of).where(of.is_not(None), of != "").order_by(studies.c.id))
    return dict(map(tuple, rows))


@dataclass(frozen=True)
class Best:
    """A complete trial that none is better than: `value` by the first objective, `values` by metric."""

    number: int
    value: float
    values: dict[str, float]
    params: dict[str, Any]


@dataclass(frozen=True)
class Status:
    """What `hpo status` shows. `state` is running, interrupted, complete or stopped; no bound is None.

    `best` is None with several objectives, `front` empty with one. `replaced` counts the trials that ended because
    another went on in their place: both are one of those requested. `imported` says which study of another tool it is.
    """

    study: str
    state: str
    requested: int | None
    max_epochs: int | None
    max_seconds: float | None
    seconds_used: float
    trials: dict[str, int]
    best: Best | None
    front: list[Best]
    epochs_trained: int
    attempts: int
    replaced: int = 0
    imported: str | None = None
    alerts: dict[str, Trouble] = field(default_factory=dict[str, Trouble])  # that a target has not taken
    tags: dict[str, str] = field(default_factory=dict[str, str])


def replaces(spec: Mapping[str, Any]) -> bool:
    """Whether a trial with a parent goes on in the place of another: so do Ray Tune's, whose strategy here is none.
    Those of a population of ours are each asked for."""
    return spec["strategy"]["name"] == "none"


def status(connection: Connection, name: str) -> Status:
    """Totals over all resumptions; a few aggregate queries whatever the number of trials."""
    study = study_row(connection, name)
    mine = trials.c.study_id == study["id"]
    counted = connection.execute(select(trials.c.state, func.count()).where(mine).group_by(trials.c.state))
    found, several = bests(connection, study), len(study["spec"]["objectives"]) > 1
    counts: dict[str, int] = dict.fromkeys(STATES, 0)
    for state, count in counted:
        counts[state] = count
    return Status(
        study=name,
        state=study_state(connection, study),
        requested=study["requested"] or None,
        max_epochs=study["max_epochs"],
        max_seconds=study["max_seconds"],
        seconds_used=study["seconds_used"],
        trials=counts,
        best=found[0] if found and not several else None,
        front=found if several else [],
        epochs_trained=connection.execute(select(func.coalesce(func.sum(_TRAINED), 0)).where(mine)).scalar_one(),
        attempts=connection.execute(select(func.count()).select_from(attempts).join(trials).where(mine)).scalar_one(),
        replaced=connection.execute(select(func.count(trials.c.parent)).where(mine)).scalar_one()
        if replaces(study["spec"])
        else 0,
        imported=_origin(study["spec"]),
        alerts=alert_queries.troubles(connection, study["id"]),
        tags=tags.given(connection, study["id"]).get(tags.STUDY, {}),
    )


def _origin(spec: Mapping[str, Any]) -> str | None:
    origin = spec.get("imported")
    return origin and f"{origin['tool']} {origin['label']!r} of {origin['source']}"


def study_state(connection: Connection, study: RowMapping) -> str:
    """An open study is running while a driver that is not known to be dead holds its lease, else interrupted."""
    if study["state"] != "open":
        return study["state"]
    lease = holder(connection, f"driver:{study['id']}")
    if lease is None or is_dead(lease["host"], lease["pid"], lease["pid_started"]):
        return "interrupted"
    return "running"


def newest_event(connection: Connection, study_id: int, kind: str) -> dict[str, Any] | None:
    """The fields of the study's last event of this kind that is of no trial, if there is one."""
    mine = (events.c.study_id == study_id) & events.c.trial_id.is_(None) & (events.c.kind == kind)
    return connection.execute(select(events.c.fields).where(mine).order_by(events.c.id.desc()).limit(1)).scalar()


def held(connection: Connection, process: Process) -> RowMapping | None:
    """The trial that a worker took last: its `number`, and the `outcome` of that attempt."""
    mine = (workers.c.host == process.host) & (workers.c.pid == process.pid)
    query = (
        select(trials.c.number, attempts.c.outcome)
        .join(attempts, attempts.c.trial_id == trials.c.id)
        .join(workers, workers.c.id == attempts.c.worker_id)
        .where(mine, workers.c.pid_started == process.started)
        .order_by(attempts.c.started_at.desc())
        .limit(1)
    )
    return connection.execute(query).mappings().first()


def is_reported(connection: Connection, study_id: int, key: str) -> bool:
    """Whether a trial of the study has ever reported a metric."""
    mine = (trials.c.study_id == study_id) & (reports.c.key == key)
    query = select(reports.c.step).join(trials, trials.c.id == reports.c.trial_id).where(mine).limit(1)
    return connection.execute(query).first() is not None


def bests(connection: Connection, study: RowMapping) -> list[Best]:
    """The best complete trial, the lowest number among equals; with several objectives the Pareto front, best first
    by the first objective."""
    objectives, found = study["spec"]["objectives"], _scored(connection, study)
    numbers = best_of(objectives, found)
    where = (trials.c.study_id == study["id"]) & trials.c.number.in_(numbers)
    asked = connection.execute(
        select(trials.c.number, asks.c.params).join(asks, asks.c.trial_id == trials.c.id).where(where)
    )
    params, metrics = dict(map(tuple, asked)), [one["metric"] for one in objectives]
    return [Best(n, found[n][0], dict(zip(metrics, found[n], strict=True)), params[n]) for n in numbers]


def ranked(connection: Connection, study: RowMapping) -> list[int]:
    """The numbers of the complete trials, best first: by front where there are several objectives, within one by the
    first objective, the lowest number among equals."""
    found = places(connection, study)
    return sorted(found, key=lambda number: found[number])


def places(connection: Connection, study: RowMapping) -> dict[int, tuple[int, int]]:
    """Number -> the front and the place, both from 0, of each complete trial that has all values."""
    return placed(study["spec"]["objectives"], _scored(connection, study))


def _scored(connection: Connection, study: RowMapping) -> dict[int, Sequence[float]]:
    """Number -> the values of each complete trial that has one for every objective."""
    mine = (trials.c.study_id == study["id"]) & (trials.c.state == "complete")
    rows = connection.execute(select(trials.c.number, trials.c["values"]).where(mine).order_by(trials.c.number))
    return {number: values for number, values in rows if values and None not in values}


def trial_rows(connection: Connection, study_id: int, numbers: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Every trial, or those of the numbers given, in number order: the columns of `trials`, and `params` and
    `config_hash` of its ask."""
    query = (
        select(trials, asks.c.params, asks.c.config_hash)
        .join(asks, asks.c.trial_id == trials.c.id)
        .where(trials.c.study_id == study_id)
        .order_by(trials.c.number)
    )
    rows = connection.execute(query.where(trials.c.number.in_(numbers)) if numbers else query)
    return [dict(row) for row in rows.mappings()]


def numbered(connection: Connection, study_id: int, numbers: Sequence[int]) -> Sequence[RowMapping]:
    """The rows of the trials of these numbers, which one statement must be able to take."""
    where = {"study": study_id, "numbers": list(numbers)}
    return connection.execute(_NUMBERED, where).mappings().all() if numbers else []


def changed(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Of `trial_rows` the numbers of those that descend from a trial with other parameters: their own are the last
    they were trained with, and not the only ones."""
    of, found = {row["number"]: row for row in rows}, set[int]()
    for row in rows:
        before = row
        while before["parent"] is not None and before["params"] == row["params"]:
            before = of[before["parent"]]
        found |= {row["number"]} if before["params"] != row["params"] else set()
    return found


def configs(connection: Connection, trial_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Trial id -> the whole configuration it was asked for with."""
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(trial_ids), PAGE):
        some = asks.c.trial_id.in_(trial_ids[start : start + PAGE])
        rows = connection.execute(select(asks.c.trial_id, asks.c.config).where(some))
        found |= {row.trial_id: row.config for row in rows}
    return found


_of_fold_0 = reports.c.trial_id.in_(bindparam("trials", expanding=True)) & (reports.c.fold == 0)
_newest = (
    select(reports.c.trial_id, reports.c.key, func.max(reports.c.step).label("step"))
    .where(_of_fold_0)
    .group_by(reports.c.trial_id, reports.c.key)
    .subquery()
)
_LAST = select(reports.c.trial_id, reports.c.key, reports.c.value).join(
    _newest,
    and_(*(reports.c[name] == _newest.c[name] for name in ("trial_id", "key", "step")), reports.c.fold == 0),
)
PAGE = 500  # trials read at once: SQLite takes 32766 parameters


def last_values(connection: Connection, trial_ids: Sequence[int]) -> dict[int, dict[str, float]]:
    """Trial id -> key -> its value at the highest step (fold 0)."""
    found: dict[int, dict[str, float]] = {}
    for start in range(0, len(trial_ids), PAGE):
        for trial_id, key, value in connection.execute(_LAST, {"trials": list(trial_ids[start : start + PAGE])}):
            found.setdefault(trial_id, {})[key] = math.nan if value is None else value
    return found


@dataclass(frozen=True)
class Judged:
    """Where a trial was judged: the step, the epoch that it closes, and all that was reported there (fold 0)."""

    step: int
    epoch: int
    metrics: dict[str, float]


_OBJECTIVES = (
    select(reports.c.trial_id, reports.c.step, reports.c.epoch, reports.c.key, reports.c.value)
    .where(_of_fold_0, reports.c.epoch.is_not(None), reports.c.key.in_(bindparam("metrics", expanding=True)))
    .order_by(reports.c.trial_id, reports.c.step)
)
_AT = select(reports.c.trial_id, reports.c.key, reports.c.value).where(
    reports.c.trial_id.in_(bindparam("trials", expanding=True)),  # SQLite finds no index for pairs alone
    tuple_(reports.c.trial_id, reports.c.step).in_(bindparam("places", expanding=True)),
    reports.c.fold == 0,
)


def judged(connection: Connection, study: RowMapping, rows: Sequence[Mapping[Any, Any]]) -> dict[int, Judged]:
    """Trial id -> where it was judged, for the rows of trials that have values.

    That is the step whose objectives are these values: the last one, or by `select="best"` the first, as they were
    chosen (`Curves.judge`).
    """
    objectives = study["spec"]["objectives"]
    metrics, first = [one["metric"] for one in objectives], objectives[0]["select"] == "best"
    values = {row["id"]: list(row["values"]) for row in rows if row["values"]}
    found: dict[int, Judged] = {}
    for start in range(0, len(values), PAGE):
        points: dict[tuple[int, int, int], dict[str, float]] = {}
        where = {"trials": list(values)[start : start + PAGE], "metrics": metrics}
        for trial_id, step, epoch, key, value in connection.execute(_OBJECTIVES, where):
            points.setdefault((trial_id, step, epoch), {})[key] = value
        at: dict[int, Judged] = {}
        for (trial_id, step, epoch), point in points.items():
            if [point.get(metric) for metric in metrics] == values[trial_id] and not (first and trial_id in at):
                at[trial_id] = Judged(step, epoch, {})
        places = [(trial_id, one.step) for trial_id, one in at.items()]
        looked_up = {"trials": list(at), "places": places}
        for trial_id, key, value in connection.execute(_AT, looked_up) if at else ():
            at[trial_id].metrics[key] = math.nan if value is None else value
        found |= at
    return found


def curves(
    connection: Connection,
    study_id: int,
    keys: Sequence[str] = (),
    numbers: Sequence[int] = (),
    after: int = -1,
) -> Iterator[tuple[int, str, int, int | None, float]]:
    """(number, key, step, epoch, value) of fold 0, by number, step and key; of the keys and numbers given, or all.

    Only of steps above `after`.
    """
    query = (
        select(trials.c.number, reports.c.key, reports.c.step, reports.c.epoch, reports.c.value)
        .join(trials, trials.c.id == reports.c.trial_id)
        .where(trials.c.study_id == study_id, reports.c.fold == 0)
        .order_by(trials.c.number, reports.c.step, reports.c.key)
    )
    if keys:
        query = query.where(reports.c.key.in_(keys))
    if after >= 0:
        query = query.where(reports.c.step > after)
    if numbers:
        query = query.where(trials.c.number.in_(numbers))
    for number, key, step, epoch, value in connection.execute(query):
        yield number, key, step, epoch, math.nan if value is None else value


def declared(patterns: Sequence[str], key: str) -> bool:
    """Whether a metric enters the digest: it matches a declared name or pattern and is not of the machine's."""
    return not machine_dependent(key) and any(fnmatchcase(key, pattern) for pattern in patterns)


def digest(connection: Connection, study: RowMapping) -> str:
    """sha256 over the trials in number order: parameters, state, every value of the declared metrics as hex floats, and
    whose checkpoint a trial began from.

    Equal digests mean the same study to the last bit, however often it was interrupted and wherever it ran.
    """
    spec = study["spec"]
    judged = (one["metric"] for one in (*spec["objectives"], *spec.get("constraints", ())))
    patterns = [*spec["metrics"], *judged]
    hasher = hashlib.sha256()
    rows = connection.execute(
        select(trials.c.number, reports.c.key, reports.c.step, reports.c.fold, reports.c.value)
        .join(trials, trials.c.id == reports.c.trial_id)
        .where(trials.c.study_id == study["id"])
        .order_by(trials.c.number, reports.c.step, reports.c.fold, reports.c.key)
    )
    values: dict[int, list[list[Any]]] = {}
    for number, key, step, fold, value in rows:
        if declared(patterns, key):
            values.setdefault(number, []).append([key, step, fold, math.nan.hex() if value is None else value.hex()])
    for trial in trial_rows(connection, study["id"]):
        params = {path: value.hex() if isinstance(value, float) else value for path, value in trial["params"].items()}
        # Python's order, not the database's collation, which differs between SQLite and PostgreSQL.
        line = [
            trial["number"],
            params,
            trial["state"],
            sorted(values.get(trial["number"], []), key=lambda v: (v[1], v[2], v[0])),
        ]
        line += [] if trial["start"] is None else [trial["parent"], trial["generation"]]
        hasher.update(json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return hasher.hexdigest()
