"""Reads what the ledger holds about a study: counts, trials, curves, the digest. Read-only, torch-free."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import and_, bindparam, exists, func, select
from sqlalchemy.engine import Connection

from hpo.door import option
from hpo.errors import StudyError
from hpo.ledger import removed as removed_trials
from hpo.ledger import tags
from hpo.ledger.answer import Best, bests, scored
from hpo.ledger.database import damage
from hpo.ledger.database.tables import asks, attempts, events, reports, studies, trials, workers
from hpo.ledger.judged import PAGE as PAGE
from hpo.ledger.judged import Judged as Judged
from hpo.ledger.judged import judged as judged
from hpo.ledger.judged import of_fold_0
from hpo.ledger.leases import holder
from hpo.ledger.names import machine_dependent
from hpo.ledger.process_id import Process, is_dead
from hpo.ledger.read import every
from hpo.ledger.removed import Removed, is_shown
from hpo.ledger.rows import AskedTrial, StudyRow, TrialRow
from hpo.ledger.stored_spec import StoredSpec
from hpo.ledger.views import alerts as alert_queries
from hpo.ledger.views.alerts import Trouble
from hpo.search.ranking import placed
from hpo.space.trial_state import STATES
from hpo.text import near

_TRAINED = trials.c.epoch - trials.c.from_epoch
_NUMBERED = select(trials).where(
    trials.c.study_id == bindparam("study"), trials.c.number.in_(bindparam("numbers", expanding=True))
)


def study_row(connection: Connection, name: str) -> StudyRow:
    """Returns the study's row; raises StudyError, which names the existing studies, if there is none."""
    row = find_study(connection, name)
    if row is None:
        names = study_names(connection)
        listing = f"it holds {', '.join(names)}" if names else "it holds none yet"
        fix = near(name, names) or f": start it with `hpo run`, or name the right {option('home')}."
        raise StudyError(f"no study {name!r} in this ledger ({listing}){fix}")
    return row


def find_study(connection: Connection, name: str) -> StudyRow | None:
    """Returns the study's row, if there is one with that name."""
    row = connection.execute(select(studies).where(studies.c.name == name)).mappings().first()
    if row is not None and damage.spec_fault(row["spec"]):
        raise ValueError(f"the specification of study {name!r} is damaged")  # the ledger adds the place
    return None if row is None else StudyRow.of(row)


def study_by_id(connection: Connection, study_id: int) -> StudyRow:
    """Returns the row of an existing study."""
    return StudyRow.of(connection.execute(select(studies).where(studies.c.id == study_id)).mappings().one())


def asked_for(connection: Connection, name: str | None = None) -> Sequence[StudyRow]:
    """Returns the open studies that have trials, oldest first: the one with that name, or all."""
    query = select(studies).where(studies.c.state == "open", exists().where(trials.c.study_id == studies.c.id))
    if name is not None:
        query = query.where(studies.c.name == name)
    return [StudyRow.of(row) for row in connection.execute(query.order_by(studies.c.id)).mappings()]


def study_names(connection: Connection) -> list[str]:
    return list(connection.execute(select(studies.c.name).order_by(studies.c.id)).scalars())


def derived(connection: Connection) -> dict[str, str]:
    """Returns derived study -> source study, by name.

    A study derived from a deleted study does not belong to a later study of the same name.
    """
    of, source = studies.c.spec["listed_of"].as_string(), studies.alias("source")
    query = select(studies.c.name, of).outerjoin(source, source.c.name == of)
    of_that_one = (source.c.id.is_(None)) | (source.c.id < studies.c.id)
    rows = connection.execute(query.where(of.is_not(None), of != "", of_that_one).order_by(studies.c.id))
    return dict(map(tuple, rows))


@dataclass(frozen=True)
class Status:
    """The content of `hpo status`. `state` is running, interrupted, complete or stopped; a missing bound is None.

    `best` is None with several objectives, `front` empty with one. `replaced` counts the trials that ended because
    another one continued them: both count as one requested trial. `removed` trials are counted and not shown;
    `removed_cost` has their states and cost. `imported` identifies the study of another tool.
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
    removed: int = 0
    removed_cost: Removed = field(default_factory=Removed)
    imported: str | None = None
    alerts: dict[str, Trouble] = field(default_factory=dict[str, Trouble])  # alerts that a target has not accepted
    tags: dict[str, str] = field(default_factory=dict[str, str])


def replaces(spec: StoredSpec) -> bool:
    """Returns whether a trial with a parent replaces another, as under Ray Tune, where the strategy is none.

    In a population of this platform each trial is asked for.
    """
    return spec.strategy["name"] == "none"


def status(connection: Connection, name: str) -> Status:
    """Returns totals over all resumptions, by a few aggregate queries for any number of trials."""
    study = study_row(connection, name)
    of_study = trials.c.study_id == study.id
    counted = connection.execute(select(trials.c.state, func.count()).where(of_study).group_by(trials.c.state))
    best_trials, several = bests(connection, study), len(study.spec.objectives) > 1
    counts: dict[str, int] = dict.fromkeys(STATES, 0)
    for state, count in counted:
        counts[state] = count
    removed = removed_trials.cost(connection, study.id)
    return Status(
        study=name,
        state=study_state(connection, study),
        requested=study.requested or None,
        max_epochs=study.max_epochs,
        max_seconds=study.max_seconds,
        seconds_used=study.seconds_used,
        trials=counts,
        best=best_trials[0] if best_trials and not several else None,
        front=best_trials if several else [],
        epochs_trained=connection.execute(select(func.coalesce(func.sum(_TRAINED), 0)).where(of_study)).scalar_one(),
        attempts=connection.execute(
            select(func.count()).select_from(attempts).join(trials).where(of_study)
        ).scalar_one(),
        replaced=connection.execute(select(func.count(trials.c.parent)).where(of_study)).scalar_one()
        if replaces(study.spec)
        else 0,
        removed=removed.count,
        removed_cost=removed,
        imported=_origin(study.spec.imported),
        alerts=alert_queries.troubles(connection, study.id),
        tags=tags.given(connection, study.id).get(tags.STUDY, {}),
    )


def _origin(origin: Mapping[str, object] | None) -> str | None:
    return f"{origin['tool']} {origin['label']!r} of {origin['source']}" if origin else None


def study_state(connection: Connection, study: StudyRow) -> str:
    """Returns the state of a study.

    An open one is running while its lease's driver is not known to be dead, else interrupted.
    """
    if study.state != "open":
        return study.state
    lease = holder(connection, f"driver:{study.id}")
    if lease is None or is_dead(lease.host, lease.pid, lease.pid_started):
        return "interrupted"
    return "running"


def newest_event(connection: Connection, study_id: int, kind: str) -> dict[str, Any] | None:
    """Returns the fields of the study's last event of this kind outside of its trials, if there is one."""
    of_study = (events.c.study_id == study_id) & events.c.trial_id.is_(None) & (events.c.kind == kind)
    return connection.execute(select(events.c.fields).where(of_study).order_by(events.c.id.desc()).limit(1)).scalar()


def held(connection: Connection, process: Process) -> tuple[int, str | None] | None:
    """Returns the number of the trial that a worker took last, and the outcome of that attempt."""
    of_process = (workers.c.host == process.host) & (workers.c.pid == process.pid)
    query = (
        select(trials.c.number, attempts.c.outcome)
        .join(attempts, attempts.c.trial_id == trials.c.id)
        .join(workers, workers.c.id == attempts.c.worker_id)
        .where(of_process, workers.c.pid_started == process.started)
        .order_by(attempts.c.started_at.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else (row.number, row.outcome)


def ranked(connection: Connection, study: StudyRow) -> list[int]:
    """Returns the numbers of the complete trials, best first; ties go to the lower number.

    With several objectives they are ordered by front, and within one by the first objective.
    """
    rank_of = ranks(connection, study)
    return sorted(rank_of, key=lambda number: rank_of[number])


def ranks(connection: Connection, study: StudyRow) -> dict[int, tuple[int, int]]:
    """Returns number -> (front, rank), both from 0, of each complete trial that has all values."""
    return placed(study.spec.objectives, scored(connection, study))


def trial_rows(
    connection: Connection, study_id: int, numbers: Sequence[int] = (), *, removed: bool = False
) -> list[AskedTrial]:
    """Returns every trial, or those with the given numbers, in number order; removed ones on request.

    They have the columns of `trials`, and `params` and `config_hash` of the ask.
    """
    query = (
        select(trials, asks.c.params, asks.c.config_hash)
        .join(asks, asks.c.trial_id == trials.c.id)
        .where(trials.c.study_id == study_id)
        .order_by(trials.c.number)
    )
    query = query if removed else query.where(is_shown)
    rows = connection.execute(query.where(trials.c.number.in_(numbers)) if numbers else query)
    return every(AskedTrial, rows)


def numbered(connection: Connection, study_id: int, numbers: Sequence[int]) -> Sequence[TrialRow]:
    """Returns the rows of the trials with these numbers, which must fit into one statement."""
    where = {"study": study_id, "numbers": list(numbers)}
    return every(TrialRow, connection.execute(_NUMBERED, where)) if numbers else []


def changed(rows: Sequence[AskedTrial]) -> set[int]:
    """Returns the numbers of trials in `trial_rows` that descend from a trial with other parameters.

    Their own parameters are only the last ones they were trained with.
    """
    row_of, numbers = {row.number: row for row in rows}, set[int]()
    for row in rows:
        before = row
        while before.parent in row_of and before.params == row.params:  # a removed one is missing
            before = row_of[before.parent]
        numbers |= {row.number} if before.params != row.params else set()
    return numbers


def configs(connection: Connection, trial_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Returns trial id -> the whole configuration of its ask."""
    config_of: dict[int, dict[str, Any]] = {}
    for start in range(0, len(trial_ids), PAGE):
        in_page = asks.c.trial_id.in_(trial_ids[start : start + PAGE])
        rows = connection.execute(select(asks.c.trial_id, asks.c.config).where(in_page))
        config_of |= {row.trial_id: row.config for row in rows}
    return config_of


_newest = (
    select(reports.c.trial_id, reports.c.key, func.max(reports.c.step).label("step"))
    .where(of_fold_0)
    .group_by(reports.c.trial_id, reports.c.key)
    .subquery()
)
_LAST = select(reports.c.trial_id, reports.c.key, reports.c.value).join(
    _newest,
    and_(*(reports.c[name] == _newest.c[name] for name in ("trial_id", "key", "step")), reports.c.fold == 0),
)


def last_values(connection: Connection, trial_ids: Sequence[int]) -> dict[int, dict[str, float]]:
    """Returns trial id -> key -> its value at the highest step (fold 0)."""
    values_of: dict[int, dict[str, float]] = {}
    for start in range(0, len(trial_ids), PAGE):
        for trial_id, key, value in connection.execute(_LAST, {"trials": list(trial_ids[start : start + PAGE])}):
            values_of.setdefault(trial_id, {})[key] = math.nan if value is None else value
    return values_of


def curves(
    connection: Connection,
    study_id: int,
    keys: Sequence[str] = (),
    numbers: Sequence[int] = (),
    after: int = -1,
) -> Iterator[tuple[int, str, int, int | None, float]]:
    """Yields (number, key, step, epoch, value) of fold 0, by number, step and key; for the given keys and numbers, or
    all.

    Only steps above `after` count, and removed trials only if they are named.
    """
    query = (
        select(trials.c.number, reports.c.key, reports.c.step, reports.c.epoch, reports.c.value)
        .join(trials, trials.c.id == reports.c.trial_id)
        .where(trials.c.study_id == study_id, reports.c.fold == 0)
        .order_by(trials.c.number, reports.c.step, reports.c.key)
    )
    query = query if numbers else query.where(is_shown)
    if keys:
        query = query.where(reports.c.key.in_(keys))
    if after >= 0:
        query = query.where(reports.c.step > after)
    if numbers:
        query = query.where(trials.c.number.in_(numbers))
    for number, key, step, epoch, value in connection.execute(query):
        yield number, key, step, epoch, math.nan if value is None else value


def declared(patterns: Sequence[str], key: str) -> bool:
    """Returns whether a metric enters the digest: it is declared, by name or pattern, and does not depend on the
    machine."""
    return not machine_dependent(key) and any(fnmatchcase(key, pattern) for pattern in patterns)


_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_VALUES = (
    select(reports.c.trial_id, reports.c.key, reports.c.step, reports.c.fold, reports.c.value)
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)))
    .order_by(reports.c.trial_id)
)


def digest(connection: Connection, study: StudyRow) -> str:
    """Returns the sha256 of the trials in number order.

    It covers parameters, state, every value of the declared metrics as hex floats, and the trial from whose checkpoint
    each began. Equal digests mean that studies are equal to the last bit, however often they were interrupted and
    wherever they ran.
    """
    spec = study.spec
    judged = (goal["metric"] for goal in (*spec.objectives, *spec.constraints))
    patterns = [*spec.metrics, *judged]
    hasher, rows = hashlib.sha256(), trial_rows(connection, study.id, removed=True)
    for start in range(0, len(rows), PAGE):
        page = rows[start : start + PAGE]
        values = _declared_values(connection, [trial.id for trial in page], patterns)
        for trial in page:
            params = {path: value.hex() if isinstance(value, float) else value for path, value in trial.params.items()}
            line = [_json(trial.number), _json(params), _json(trial.state), values.get(trial.id, "[]")]
            line += [] if trial.start is None else [_json(trial.parent), _json(trial.generation)]
            hasher.update(f"[{','.join(line)}]\n".encode())
    return hasher.hexdigest()


def _declared_values(connection: Connection, trial_ids: Sequence[int], patterns: Sequence[str]) -> dict[int, str]:
    """Returns trial id -> a JSON list of [key, step, fold, value as a hex float] for each value of the digest.

    It is built as text, because lists of lists cost the garbage collector more than all the rest.
    """
    names: dict[str, str] = {}  # as JSON; empty for one that does not enter the digest
    values: dict[int, str] = {}
    for trial_id, rows in groupby(connection.execute(_VALUES, {"trials": list(trial_ids)}), itemgetter(0)):
        points: list[tuple[int, int, str, str]] = []
        for _, key, step, fold, value in rows:
            if key not in names:
                names[key] = _json(key) if declared(patterns, key) else ""
            if name := names[key]:
                exact = (math.nan if value is None else value).hex()
                points.append((step, fold, key, f'[{name},{step},{fold},"{exact}"]'))
        points.sort()  # Python's order, not the database's collation, which differs between SQLite and PostgreSQL
        values[trial_id] = f"[{','.join(text for *_, text in points)}]"
    return values
