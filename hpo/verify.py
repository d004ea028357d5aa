"""`hpo verify`: a home against itself. The ledger's own rules, its checkpoints on disk, and what the tracker shows.

"Behind" is what the tracker has not been sent yet, told by the cursors alone; "differs" is what was sent and does not
stand there as it should, or stands there without having been sent.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.engine import Connection, RowMapping

from hpo.home import Home
from hpo.ledger import Ledger, reads
from hpo.ledger.process import is_dead
from hpo.ledger.tables import (
    OPEN_STATES,
    TERMINAL_STATES,
    asks,
    attempts,
    checkpoints,
    leases,
    mirrors,
    reports,
    trials,
    workers,
)
from hpo.tracking import projection
from hpo.tracking.base import Point, Refused, RunView, Tracker, Unreachable
from hpo.tracking.mlflow import MlflowTracker, tracker_name
from hpo.tracking.projection import sha256

MANIFEST = "manifest.json"


@dataclass
class Report:
    """`counts` of what was looked at; `differences`, one sentence each; `behind` as `hpo.mirror.behind` counts."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    behind: int = 0


def verify(home: Home, storage: str, tracking_uri: str, study: str | None = None) -> Report:
    """Check one study, or all there are; reads only. Beside a live study, what is still moving is left out."""
    report = Report()
    ledger = Ledger(storage, create=False)
    try:
        if ledger.is_sqlite:
            _integrity(ledger, report)
        with ledger.read() as connection:
            rows = [reads.study_row(connection, name) for name in ([study] if study else reads.study_names(connection))]
        # Rows that break the ledger's own rules are nothing to hold a tracker against.
        sound = [row for row in rows if _check_study(ledger, row, home, report)]
        _check_tracker(ledger, sound, home, tracking_uri, report)
    finally:
        ledger.close()
    return report


def _integrity(ledger: Ledger, report: Report) -> None:
    with ledger.read() as connection:
        for (line,) in connection.exec_driver_sql("PRAGMA integrity_check"):
            if line != "ok":
                report.differences.append(f"ledger: {line}")
        for row in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            report.differences.append(f"ledger: a row of {row[0]} points to no row of {row[2]}")


# The ledger against its own rules


def _check_study(ledger: Ledger, study: RowMapping, home: Home, report: Report) -> bool:
    """Whether the trials' rows are as they must be; the rest of what is wrong is only reported."""
    report.counts["studies"] += 1
    with ledger.read() as connection:
        mine = trials.c.study_id == study["id"]
        rows = connection.execute(select(trials).where(mine).order_by(trials.c.number)).mappings().all()
        alive = reads.study_state(connection, study) == "running"
        sound = _check_numbers(connection, study, rows, report)
        _check_attempts(connection, study, rows, alive, report)
        _check_lease(connection, study, report)
        kept = connection.execute(
            select(trials.c.number, trials.c.state.label("trial_state"), checkpoints)
            .join(trials)
            .where(mine)
            .order_by(trials.c.number, checkpoints.c.step)
        ).mappings()
        found: dict[int, list[RowMapping]] = defaultdict(list)
        for row in kept:
            found[row["number"]].append(row)
        report.counts["reports"] += connection.execute(
            select(func.count()).select_from(reports.join(trials)).where(mine)
        ).scalar_one()
    for trial in rows:
        _check_checkpoints(study["name"], trial, found.get(trial["number"], []), home, alive, report)
    return sound


def _check_numbers(connection: Connection, study: RowMapping, rows: Iterable[RowMapping], report: Report) -> bool:
    name, before = study["name"], len(report.differences)
    numbers = [row["number"] for row in rows]
    report.counts["trials"] += len(numbers)
    if numbers != list(range(len(numbers))):
        report.differences.append(f"{name}: the trials' numbers are not 0 to {len(numbers) - 1}: {numbers}")
    asked = set(
        connection.execute(select(asks.c.trial_id).join(trials).where(trials.c.study_id == study["id"])).scalars()
    )
    fences = (
        select(reports.c.trial_id, func.max(reports.c.fence))
        .join(trials)
        .where(trials.c.study_id == study["id"])
        .group_by(reports.c.trial_id)
    )
    newest: dict[int, int] = dict(map(tuple, connection.execute(fences)))
    for row in rows:
        at = f"{name}: trial {row['number']}"
        if row["id"] not in asked:
            report.differences.append(f"{at} has no ask")
        if newest.get(row["id"], 0) > row["fence"]:
            report.differences.append(f"{at} has a report of fence {newest[row['id']]}, above its own {row['fence']}")
        if row["state"] not in OPEN_STATES + TERMINAL_STATES:
            report.differences.append(f"{at} is in no known state: {row['state']!r}")
        if (row["state"] in TERMINAL_STATES) != (row["ended_at"] is not None):
            report.differences.append(f"{at} is {row['state']}, and its end is {row['ended_at']}")
    return len(report.differences) == before


def _check_attempts(
    connection: Connection, study: RowMapping, rows: Iterable[RowMapping], alive: bool, report: Report
) -> None:
    """A terminal trial has no open attempt, an open one at most the one of its fence, held by a worker that lives."""
    query = (
        select(attempts, workers.c.host, workers.c.pid, workers.c.pid_started)
        .join(trials, trials.c.id == attempts.c.trial_id)
        .join(workers, workers.c.id == attempts.c.worker_id)
        .where(trials.c.study_id == study["id"])
    )
    by_trial: dict[int, list[RowMapping]] = defaultdict(list)
    for row in connection.execute(query).mappings():
        report.counts["attempts"] += 1
        by_trial[row["trial_id"]].append(row)
    for trial in rows:
        at = f"{study['name']}: trial {trial['number']}"
        running = [row for row in by_trial[trial["id"]] if row["outcome"] is None]
        right = [row for row in running if trial["state"] == "running" and row["fence"] == trial["fence"]]
        for row in running:
            if row not in right:
                report.differences.append(f"{at} is {trial['state']}, but its attempt {row['fence']} has not ended")
        if trial["state"] == "running" and not right:
            report.differences.append(f"{at} is running without an attempt")
        # While a driver lives it takes such a trial back; a dead study's waits for `hpo resume`.
        if not alive and any(is_dead(row["host"], row["pid"], row["pid_started"]) for row in right):
            report.differences.append(f"{at} is running, but its worker is dead: `hpo resume` takes it up again")


def _check_lease(connection: Connection, study: RowMapping, report: Report) -> None:
    for kind in ("driver", "mirror"):
        lease = connection.execute(select(leases).where(leases.c.name == f"{kind}:{study['id']}")).mappings().first()
        if lease is None or lease["owner"] is None:
            continue
        report.counts["leases"] += 1
        if is_dead(lease["host"], lease["pid"], lease["pid_started"]):
            report.differences.append(
                f"{study['name']}: the {kind}'s lease is held by a dead process, pid {lease['pid']} on {lease['host']}"
            )


# Checkpoints on disk


def _check_checkpoints(
    study: str, trial: RowMapping, rows: list[RowMapping], home: Home, alive: bool, report: Report
) -> None:
    if alive and trial["state"] in OPEN_STATES:
        return  # they come and go
    at = f"{study}: trial {trial['number']}"
    root = home.checkpoints(study, trial["number"])
    expected = set()
    for row in rows:
        if row["state"] == "kept":
            report.counts["checkpoints"] += 1
            report.differences += [f"{at}: {text}" for text in check_checkpoint(root / row["path"], row["sha256"])]
            expected.add(row["path"])
        elif row["state"] == "damaged":
            expected |= {row["path"], f"{row['path']}.corrupt"}
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if entry.name not in expected:
            what = "a leftover temporary directory" if entry.suffix == ".tmp" else "no checkpoint that the ledger keeps"
            report.differences.append(f"{at}: {entry} is {what}")


def check_checkpoint(path: Path, expected: str) -> list[str]:
    """What is wrong with a checkpoint whose manifest should have the sha256 `expected`."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return [f"checkpoint {path.name} is missing"]
    if sha256(manifest) != expected:
        return [f"the manifest of checkpoint {path.name} is not the one that was committed"]
    wrong = []
    for name, entry in json.loads(manifest.read_text())["files"].items():
        if not (path / name).is_file():
            wrong.append(f"checkpoint {path.name} lacks {name}")
        elif sha256(path / name) != entry["sha256"]:
            wrong.append(f"{name} of checkpoint {path.name} is damaged")
    return wrong


# The tracker against the ledger


def _check_tracker(ledger: Ledger, studies: list[RowMapping], home: Home, tracking_uri: str, report: Report) -> None:
    name = tracker_name(tracking_uri)
    with ledger.read() as connection:
        report.behind = sum(projection.behind(connection, name, study) for study in studies)
    try:
        tracker = MlflowTracker(tracking_uri, home.artifacts)
        for study in studies:
            _Comparison(ledger, tracker, study, home, report).run()
        tracker.close()
    except (Unreachable, Refused) as error:
        report.differences.append(str(error))


class _Comparison:
    """One study in the tracker against the ledger."""

    def __init__(self, ledger: Ledger, tracker: Tracker, study: RowMapping, home: Home, report: Report) -> None:
        self._ledger, self._tracker, self._study, self._home, self._report = ledger, tracker, study, home, report

    def run(self) -> None:
        """Cursors first, then the tracker, then the ledger: beside a live mirror what was sent is there, and what is
        there is in the ledger."""
        name, uid = self._study["name"], self._study["uid"]
        where = (mirrors.c.tracker == self._tracker.name) & (mirrors.c.study_id == self._study["id"])
        with self._ledger.read() as connection:
            cursors = {row["number"]: row for row in connection.execute(mirrors.select().where(where)).mappings()}
        if not cursors:
            return
        views = {view.run_id: view for view in self._tracker.find(name, uid, children=True)}
        self._check_parent(cursors[projection.STUDY]["run_id"])
        self._check_unique(list(views.values()), cursors)
        stored: dict[str, list[Point]] = defaultdict(list)
        for run_id, point in self._tracker.points(list(views.values())):
            stored[run_id].append(point)
        with self._ledger.read() as connection:
            alive = reads.study_state(connection, self._study) == "running"
            for trial in projection.everything(connection, self._study, self._home):
                if trial.number in cursors:
                    self._check_trial(connection, trial, cursors[trial.number], views, stored, alive)

    def _check_parent(self, run_id: str) -> None:
        self._report.counts["runs"] += 1
        found = [view.run_id for view in self._tracker.find(self._study["name"], self._study["uid"])]
        if found != [run_id]:
            self._differ(f"MLflow has the runs {found} for the study, not {run_id} alone")

    def _check_unique(self, views: list[RunView], cursors: Mapping[int, RowMapping]) -> None:
        recorded = {row["run_id"] for row in cursors.values()}
        for uid, count in Counter(view.uid for view in views).items():
            if count > 1:
                self._differ(f"MLflow has {count} runs for trial {uid.rpartition('/')[2]}")
        for view in views:
            self._report.counts["runs"] += 1
            number = int(view.uid.rpartition("/")[2])
            if view.run_id not in recorded and number in cursors:
                self._differ(f"MLflow's run {view.run_id} of trial {number} is not the one recorded")

    def _check_trial(
        self,
        connection: Connection,
        trial: projection.Pending,
        cursor: RowMapping,
        views: Mapping[str, RunView],
        stored: Mapping[str, list[Point]],
        alive: bool,
    ) -> None:
        view = views.get(cursor["run_id"])
        if view is None:
            self._differ(f"trial {trial.number}: its run {cursor['run_id']} is not in MLflow (deleted there?)")
            return
        sent_all = cursor["revision"] == trial.revision
        unsent = set() if sent_all else projection.unsent(connection, trial, cursor["revision"])
        self._check_points(trial, stored.get(view.run_id, []), unsent)
        self._check_run(trial, view, sent_all)
        if sent_all and not (alive and trial.batch.ended_at is None):
            self._check_artifacts(trial, view.run_id)

    def _check_points(self, trial: projection.Pending, stored: list[Point], unsent: set[tuple[str, int]]) -> None:
        """All that was sent stands once; what stands beyond it is at least in the ledger."""
        self._report.counts["points"] += len(stored)
        have = Counter(_exact(point) for point in stored)
        known = {_exact(point) for point in trial.batch.points}
        for point in trial.batch.points:
            if _exact(point) not in have and (point.key, point.step) not in unsent:
                self._differ(f"trial {trial.number}: MLflow lacks {point.key} = {point.value!r} at step {point.step}")
        for exact, count in have.items():
            key, step, _, value = exact
            if exact not in known:
                self._differ(f"trial {trial.number}: MLflow has {key} = {value} at step {step}, the ledger has not")
            elif count > 1:
                self._differ(f"trial {trial.number}: {key} at step {step} stands {count} times in MLflow")

    def _check_run(self, trial: projection.Pending, view: RunView, sent_all: bool) -> None:
        wanted: dict[str, Any] = {"params": dict(trial.batch.params)}
        shown: dict[str, Any] = {"params": dict(view.params)}
        if sent_all:
            tags = {**trial.run.tags, **trial.batch.tags}
            wanted |= {"status": trial.batch.status, "ended_at": trial.batch.ended_at, "tags": tags}
            shown |= {"status": view.status, "ended_at": view.ended_at}
            shown["tags"] = {key: view.tags.get(key) for key in tags}
        for what, value in wanted.items():
            if shown[what] != value:
                self._differ(f"trial {trial.number}: MLflow has the {what} {shown[what]}, the ledger {value}")

    def _check_artifacts(self, trial: projection.Pending, run_id: str) -> None:
        have = self._tracker.digests(run_id)
        want = projection.digests(trial.batch)
        self._report.counts["artifacts"] += len(have)
        for name in sorted(have.keys() | want.keys()):
            if have.get(name) != want.get(name):
                state = "lacks" if name not in have else "has another" if name in want else "still has"
                self._differ(f"trial {trial.number}: MLflow {state} {name}")

    def _differ(self, text: str) -> None:
        self._report.differences.append(f"{self._study['name']}: {text}")


def _exact(point: Point) -> tuple[str, int, int, str]:
    return point.key, point.step, point.timestamp, projection.stored(point.value).hex()
