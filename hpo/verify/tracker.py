"""Compares a study's data in the tracker with the ledger."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import closing

from hpo.door import option
from hpo.ledger import Ledger, leases, promotions, queries
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.ledger.views.mirror import LEFT, STUDY, Cursor
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking import curves, projection, run_files
from hpo.tracking.base import PROMOTED, Batch, ModelView, Point, Refused, RunView, Tracker, Unreachable
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.repair import unlike
from hpo.tracking.runs_ahead import ahead
from hpo.tracking.uri import tracker_name
from hpo.verify.report import Report


def check(ledger: Ledger, study: StudyRow, home: Home, tracking_uri: str, report: Report) -> None:
    """Compares the study's runs, if any was ever sent to this tracker; creates nothing there."""
    name = tracker_name(tracking_uri)
    report.behind += ledger.look(lambda connection: projection.behind(connection, name, study))
    cursors = ledger.look(lambda connection: mirror_queries.cursors(connection, name, study.id))
    if not cursors:
        return
    try:
        tracker = MlflowTracker(tracking_uri, home.artifacts, create=False)
        with closing(tracker):
            _Comparison(ledger, tracker, study, home, report).run(cursors)
            _check_promotions(ledger, tracker, study, report)
    except (Unreachable, Refused) as error:
        report.differences.append(f"{study.name}: {error}")


def _check_promotions(ledger: Ledger, tracker: MlflowTracker, study: StudyRow, report: Report) -> None:
    """Reports missing promoted versions; their alias may have been moved to another version."""
    for row in ledger.look(lambda connection: promotions.standing(connection, study.id)):
        if row.tracker == tracker.name and not tracker.registry().has_version(row.name, row.version or ""):
            undo = command(f"promote --undo --name {shlex.quote(row.name)} --study {study.name}")
            report.differences.append(
                f"{study.name}: trial {row.trial} is promoted to version {row.version} of model {row.name}, which "
                f"is not in MLflow (deleted there?): `{undo}` takes that back"
            )


class _Comparison:
    """Compares one study in the tracker with the ledger."""

    def __init__(self, ledger: Ledger, tracker: Tracker, study: StudyRow, home: Home, report: Report) -> None:
        self._ledger, self._tracker, self._study, self._home, self._report = ledger, tracker, study, home, report

    def run(self, cursors: Mapping[int, Cursor]) -> None:
        """Compares the study and its trials.

        It reads the cursors first, then the tracker, then the ledger: while a mirror works, everything sent is in the
        tracker and everything in the tracker is in the ledger.
        """
        name, uid = self._study.name, self._study.uid
        if cursors[STUDY].revision == LEFT:
            return  # the user chose to leave its runs deleted
        self._tracker.recall(name, cursors[STUDY].run_id)
        views = {view.run_id: view for view in self._tracker.find(name, uid, children=True)}
        parents = self._tracker.find(name, uid)
        self._models: dict[str, list[ModelView]] = defaultdict(list)
        for model in self._tracker.models(name):
            self._models[model.run_id].append(model)
        self._check_unique(list(views.values()), cursors)
        stored: dict[str, list[Point]] = defaultdict(list)
        for run_id, point in self._tracker.points(list(views.values())):
            stored[run_id].append(point)
        with self._ledger.read() as connection:
            study = queries.study_row(connection, name)
            state = queries.study_state(connection, study)
            self._check_study(connection, parents, cursors[STUDY], study, state)
            later = {*ahead(connection, study, views.values()).values()}
            for number in sorted(later):
                self._differ(
                    f"trial {number}: MLflow shows what the ledger does not know, which was taken back: "
                    f"`{command('sync')}` makes its run anew"
                )
            self._keys = projection.metric_keys(connection, study)
            for trial in projection.everything(connection, study, self._home):
                if trial.number in cursors.keys() - later and cursors[trial.number].revision != LEFT:
                    self._check_trial(connection, trial, cursors[trial.number], views, stored, state == "running")

    # The study's own run

    def _check_study(
        self, connection: Connection, runs: list[RunView], cursor: Cursor, study: StudyRow, state: str
    ) -> None:
        """Checks the study's run, unless a live or dead mirror has yet to complete it."""
        self._report.counts["runs"] += 1
        ids = [view.run_id for view in runs]
        if ids != [cursor.run_id]:
            self._differ(f"MLflow has the runs {ids} for the study, not {cursor.run_id} alone: {self._again}")
            return
        mirror = leases.holder(connection, f"mirror:{study.id}")
        if mirror is None and cursor.revision == study.revision and state != "running":
            batch = projection.study_batch(connection, study, self._home, state)
            ends = max((point.step for point in batch.points), default=0)
            if study.state != "open" or curves.marked(runs[0].tags) <= ends:
                self._check_run("the study", runs[0], batch, projection.study_run(study).tags)
                self._check_curves(runs[0], batch)
            # Otherwise the ledger was restored, and a resume reaches the same points again.
            if locations.has_results(self._home, study):
                self._check_artifacts("the study", runs[0].run_id, batch)

    def _check_curves(self, view: RunView, batch: Batch) -> None:
        """Checks that each sent step of the curves exists once, with the ledger's value.

        A ledger that was reset to an earlier state may have other times.
        """
        ours = {point.key for point in batch.points}
        stored = [
            (point.key, point.step, point.value) for _, point in self._tracker.points([view]) if point.key in ours
        ]
        sent = {point for point in batch.points if point.step <= curves.marked(view.tags)}
        if Counter(stored) != Counter((point.key, point.step, projection.stored(point.value)) for point in sent):
            self._differ("the curves of the study's run in MLflow are not the ledger's")

    # The trials' runs

    def _check_unique(self, views: list[RunView], cursors: Mapping[int, Cursor]) -> None:
        recorded = {cursor.run_id for cursor in cursors.values()}
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
        cursor: Cursor,
        views: Mapping[str, RunView],
        stored: Mapping[str, list[Point]],
        alive: bool,
    ) -> None:
        at, view = f"trial {trial.number}", views.get(cursor.run_id)
        if view is None:
            self._differ(f"{at}: its run {cursor.run_id} is not in MLflow (deleted there?): {self._again}")
            return
        sent_all = cursor.revision == trial.revision
        unsent = set() if sent_all else projection.unsent(connection, trial, cursor.revision)
        self._check_points(trial, stored.get(view.run_id, []), unsent)
        self._check_params(at, view, trial.batch)
        if sent_all:
            self._check_run(at, view, trial.batch, trial.run.tags)
        if sent_all and not (alive and trial.batch.ended_at is None):
            run_files.fetch(trial.location, trial.batch.files)
            self._check_artifacts(at, view.run_id, trial.batch)
            self._check_models(at, view.run_id, trial.batch)

    def _check_points(self, trial: projection.Pending, stored: list[Point], unsent: set[tuple[str, int]]) -> None:
        """Checks that each point sent is there once, and that the ledger has all others of the study's metrics."""
        self._report.counts["points"] += len(stored)
        have = Counter(_exact(point) for point in stored)
        known = {_exact(point) for point in trial.batch.points}
        for point in trial.batch.points:
            if _exact(point) not in have and (point.key, point.step) not in unsent:
                self._differ(f"trial {trial.number}: MLflow lacks {point.key} = {point.value!r} at step {point.step}")
        complete = trial.batch.tags["hpo.state"] == "complete"
        for exact, count in have.items():
            key, step, _, value = exact
            if key not in self._keys:
                continue  # a metric that the user logged
            if exact not in known and not complete and key.partition("/")[0] == "objective":
                continue  # earlier releases sent it for every trial with a value
            if exact not in known:
                self._differ(f"trial {trial.number}: MLflow has {key} = {value} at step {step}, the ledger has not")
            elif count > 1:
                self._differ(f"trial {trial.number}: {key} at step {step} stands {count} times in MLflow")

    def _check_params(self, at: str, view: RunView, batch: Batch) -> None:
        shown = {name: value for name, value in view.params.items() if name in batch.params}
        if shown != batch.params:
            self._differ(f"{at}: MLflow has the params {shown}, the ledger {dict(batch.params)}")

    def _check_run(self, at: str, view: RunView, batch: Batch, opened_with: Mapping[str, str]) -> None:
        for label, value, wanted in unlike(view, batch, opened_with):
            self._differ(f"{at}: MLflow has the {label} {value}, the ledger {wanted}")

    def _check_artifacts(self, at: str, run_id: str, batch: Batch) -> None:
        have = self._tracker.digests(run_id)
        self._report.counts["artifacts"] += len(have)
        self._compare(at, have, run_files.digests(batch.texts, batch.files))

    def _check_models(self, at: str, run_id: str, batch: Batch) -> None:
        """Checks that each model is there once, finished, with its metrics and files, and that there are no others."""
        named = [view for view in self._models.get(run_id, []) if run_files.is_model(view.name)]
        sent = [view for view in named if PROMOTED not in view.tags]
        self._report.counts["models"] += len(sent)
        if (names := sorted(view.name for view in sent)) != (wanted := sorted(model.name for model in batch.models)):
            self._differ(f"{at}: MLflow has the models {names}, the ledger {wanted}")
            return
        views = {view.name: view for view in sent}
        for model in batch.models:
            view = views[model.name]
            if not view.finished:
                self._differ(f"{at}: MLflow's model {model.name} is not finished")
            if {_exact(point) for point in view.points} != {_exact(point) for point in model.points}:
                self._differ(f"{at}: the metrics of MLflow's model {model.name} are not the ledger's")
            if any(view.tags.get(key) != value for key, value in model.tags.items()):
                self._differ(f"{at}: the tags of MLflow's model {model.name} are not the ledger's")
            have = self._tracker.model_digests(view.model_id)
            self._compare(f"{at}: model {model.name}", have, run_files.digests(model.texts, model.files))

    def _compare(self, at: str, have: Mapping[str, str], want: Mapping[str, str]) -> None:
        """Compares files by digest; a file with a name the platform does not use belongs to the user."""
        for name in sorted(want.keys() | {name for name in have if run_files.is_checkpoint(name)}):
            if have.get(name) != want.get(name):
                state = "lacks" if name not in have else "has another" if name in want else "still has"
                self._differ(f"{at}: MLflow {state} {name}")

    @property
    def _again(self) -> str:
        return f"`{command('sync')}` makes it again, and with {option('deleted', 'leave')} it stays so"

    def _differ(self, text: str) -> None:
        self._report.differences.append(f"{self._study.name}: {text}")


def _exact(point: Point) -> tuple[str, int, int, str]:
    return point.key, point.step, point.timestamp, projection.stored(point.value).hex()
