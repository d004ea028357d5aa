"""MLflow's SQLite database, written without MLflow: its import and its client cost a mirror more than all else it does.

What is written is what MLflow's own client writes, row for row, which a test holds against it. It is done only in a
database whose tables are those that the installed MLflow is recorded to make (`mlflow_store.py`); what this module does
not know, such as names that MLflow may refuse, it leaves to the client.

A write is committed at once but reaches the disk with `flush`: SQLite in WAL mode with synchronous NORMAL loses no
order and no consistency, and only what follows the last sync of the WAL where the machine itself dies (SQLite's
documentation, "WAL", durability). A mirror moves its cursors after `flush`, so one sync does for many runs.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.ledger.sqlite_url import path_of
from hpo.tracking.base import Batch, Dataset, Model, Point, Refused, Run, RunView
from hpo.tracking.datasets import CONTEXT, source_of
from hpo.tracking.files import directory_of
from hpo.tracking.mlflow import MlflowTracker
from hpo.tracking.mlflow_models import lay_out, take_away
from hpo.tracking.mlflow_store import REVISION, recorded
from hpo.tracking.rows import LARGEST
from hpo.tracking.uri import check_uri

_MADE = ("points", "params", "tags", "texts", "files", "datasets", "models", "status", "ended_at")
_REMOVED = ("removed", "removed_models", "removed_tags")
_SHOWN = ("values", "violations")  # of a batch, in other trackers alone
_KEY, _NAME = re.compile(r"[\w.\- :/]{1,250}"), re.compile(r"[\w-]{1,250}")  # what MLflow takes as it is
_TEXT = 5000  # characters that MLflow cuts nowhere
_PENDING, _READY = 1, 2  # of mlflow.entities.LoggedModelStatus


def open_mlflow(uri: str, artifacts: Path) -> MlflowTracker:
    """MLflow at `uri`, to be written: by this module where it can be, else by MLflow's client."""
    check_uri(uri)
    return (SqliteTracker if _known(uri) else MlflowTracker)(uri, artifacts)


def _known(uri: str) -> bool:
    """Whether `uri` is a SQLite database that this module writes, or would be once it is made."""
    database = path_of(uri) if uri.startswith("sqlite") else None
    if database is None or not recorded():
        return False
    try:
        if not database.exists() or not database.stat().st_size:
            return True
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            return connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(REVISION,)]
    except (OSError, sqlite3.Error):
        return False  # the client says what is wrong with it


class SqliteTracker(MlflowTracker):
    """A tracker at `sqlite:///PATH`, whose tables are the recorded ones."""

    def _connect(self) -> None:
        database = path_of(self._address) or Path()
        self._rows = sqlite3.connect(database, timeout=60, check_same_thread=False, isolation_level=None)
        self._rows.execute("PRAGMA synchronous = NORMAL")
        self._wal = Path(f"{database}-wal")

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        experiment = self._known(study)
        which, named = ("GLOB", f"{uid}/*") if children else ("=", uid)
        with self._speaking():
            rows = self._rows.execute(
                "SELECT run_uuid, status, end_time, artifact_uri FROM runs WHERE experiment_id = ? AND lifecycle_stage "
                f"= 'active' AND run_uuid IN (SELECT run_uuid FROM tags WHERE key = 'hpo.run_uid' AND value {which} ?) "
                "ORDER BY start_time, run_uuid",
                (experiment, named),
            ).fetchall()
            return [self._run_view(*row) for row in rows]

    def _run_view(self, run_id: str, status: str, ended_at: int | None, place: str) -> RunView:
        self._roots[run_id] = place
        tags, params = (
            dict(self._rows.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", (run_id,)).fetchall())
            for table in ("tags", "params")
        )
        keys = self._rows.execute("SELECT key FROM latest_metrics WHERE run_uuid = ?", (run_id,))
        return RunView(run_id, tags["hpo.run_uid"], status, ended_at, tags, params, frozenset(key for (key,) in keys))

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        experiment = self._experiment(study)
        with self._speaking(), self._writing():
            self._rows.executemany(
                "INSERT OR REPLACE INTO experiment_tags (experiment_id, key, value) VALUES (?, ?, ?)",
                [(experiment, *tag) for tag in tags.items()],
            )

    def send(self, run_id: str, batch: Batch) -> None:
        unknown = replace(batch, **{name: getattr(Batch(), name) for name in (*_MADE, *_REMOVED, *_SHOWN)})
        if unknown != Batch() or not _plain(batch):
            return super().send(run_id, batch)
        with self._speaking():
            experiment = self._active(run_id, batch.params)
            self._send_artifacts(run_id, batch)
            self._send_models(experiment, run_id, batch)
            with self._writing():
                self._log(experiment, run_id, batch)
        return None

    def flush(self) -> None:
        with self._speaking():
            if self._wal.exists():
                handle = os.open(self._wal, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def close(self) -> None:
        self._rows.close()
        super().close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self._rows.execute("BEGIN IMMEDIATE")
            yield
            self._rows.execute("COMMIT")
        except BaseException:
            if self._rows.in_transaction:
                self._rows.execute("ROLLBACK")
            raise

    def _made_run(self, experiment: str, run: Run, tags: dict[str, str]) -> tuple[str, str]:
        run_id = uuid.uuid4().hex
        with self._writing():
            place = f"{self._place(experiment)}/{run_id}/artifacts"
            self._rows.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status, "
                "start_time, source_version, lifecycle_stage, artifact_uri, experiment_id) "
                "VALUES (?, ?, 'UNKNOWN', '', '', ?, 'RUNNING', ?, '', 'active', ?, ?)",
                (run_id, run.name, tags["mlflow.user"], run.started_at, place, experiment),
            )
            self._tag(run_id, {**tags, "mlflow.runName": run.name})
        return run_id, place

    def _place(self, experiment: str) -> str:
        """The artifact location of an experiment, which must not be deleted."""
        [(place, stage)] = self._rows.execute(
            "SELECT artifact_location, lifecycle_stage FROM experiments WHERE experiment_id = ?", (experiment,)
        ).fetchall() or [("", "gone")]
        if stage != "active":
            raise Refused(f"MLflow at {self.name} refuses this: experiment {experiment} is {stage}.")
        return place

    def _made_experiment(self, study: str, place: str | None) -> str:
        with self._writing():
            now = _now()
            made = self._rows.execute(
                "INSERT INTO experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time, "
                "workspace) VALUES (?, ?, 'active', ?, ?, 'default')",
                (study, place, now, now),
            )
        return str(made.lastrowid)

    def _experiment_named(self, study: str) -> tuple[str, str] | None:
        found = self._rows.execute(
            "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ? AND workspace = 'default'", (study,)
        ).fetchone()
        return None if found is None else (str(found[0]), found[1])

    def _artifact_uri(self, run_id: str) -> str:
        if run_id not in self._roots:
            [(place,)] = self._rows.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", (run_id,))
            self._roots[run_id] = place
        return self._roots[run_id]

    def _active(self, run_id: str, params: Mapping[str, str]) -> int:
        """The experiment of a run; Refused unless it stands and shows no other value of one of `params`."""
        rows = self._rows.execute("SELECT experiment_id, lifecycle_stage FROM runs WHERE run_uuid = ?", (run_id,))
        experiment, stage = rows.fetchone() or (0, "gone")
        why = "" if stage == "active" else f"run {run_id} is {stage}"
        if not why and params:
            shown = dict(self._rows.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,)).fetchall())
            changed = [key for key, value in params.items() if shown.get(key, value) != value]
            why = f"the parameters of a run never change, and {', '.join(changed)} would" if changed else ""
        if why:
            raise Refused(f"MLflow at {self.name} refuses this: {why}.")
        return experiment

    def _log(self, experiment: int, run_id: str, batch: Batch) -> None:
        self._rows.executemany(
            "INSERT OR IGNORE INTO params (run_uuid, key, value) VALUES (?, ?, ?)",
            [(run_id, *param) for param in batch.params.items()],
        )
        self._measure(run_id, batch.points)
        self._tag(run_id, batch.tags)
        removed = [(run_id, key) for key in batch.removed_tags]
        self._rows.executemany("DELETE FROM tags WHERE run_uuid = ? AND key = ?", removed)
        for one in batch.datasets:
            self._read(experiment, run_id, one)
        if batch.ended_at is not None:
            ended = (batch.status or "FINISHED", batch.ended_at, run_id)
            self._rows.execute("UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?", ended)
        elif batch.status is not None:
            self._rows.execute("UPDATE runs SET status = ? WHERE run_uuid = ?", (batch.status, run_id))

    def _measure(self, run_id: str, points: Sequence[Point]) -> None:
        stored = [(p.key, p.step, p.timestamp, *_stored(p.value)) for p in points]
        self._rows.executemany(
            "INSERT OR IGNORE INTO metrics (run_uuid, key, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?, ?)",
            [(run_id, *row) for row in stored],
        )
        latest: dict[str, tuple[Any, ...]] = {}
        for row in stored:
            latest[row[0]] = max(row, latest.get(row[0], row), key=lambda one: one[1:4])
        self._rows.executemany(
            "INSERT INTO latest_metrics (run_uuid, key, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run_uuid, key) DO UPDATE SET step = excluded.step, timestamp = excluded.timestamp, "
            "value = excluded.value, is_nan = excluded.is_nan WHERE (excluded.step, excluded.timestamp, excluded.value)"
            " > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)",
            [(run_id, *row) for row in latest.values()],
        )

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._rows.executemany(
            "INSERT OR REPLACE INTO tags (run_uuid, key, value) VALUES (?, ?, ?)",
            [(run_id, *tag) for tag in tags.items()],
        )

    def _read(self, experiment: int, run_id: str, one: Dataset) -> None:
        """Show that a run has read a data set, which stands once in an experiment."""
        new = (uuid.uuid4().hex, experiment, one.name, one.digest, "local", source_of(one), one.profile)
        self._rows.execute(
            "INSERT OR IGNORE INTO datasets (dataset_uuid, experiment_id, name, digest, dataset_source_type, "
            "dataset_source, dataset_profile) VALUES (?, ?, ?, ?, ?, ?, ?)",
            new,
        )
        which = "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?"
        [(dataset,)] = self._rows.execute(which, new[1:4]).fetchall()
        input_uuid = uuid.uuid4().hex
        made = self._rows.execute(
            "INSERT OR IGNORE INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id) "
            "VALUES (?, 'DATASET', ?, 'RUN', ?)",
            (input_uuid, dataset, run_id),
        )
        if made.rowcount:
            of_input = (input_uuid, CONTEXT, one.field)
            self._rows.execute("INSERT INTO input_tags (input_uuid, name, value) VALUES (?, ?, ?)", of_input)

    # models, each step of which can be done again (mlflow_models.py)

    def _send_models(self, experiment: int, run_id: str, batch: Batch) -> None:
        if not (batch.models or batch.removed_models):
            return
        standing: dict[str, tuple[str, str, int]] = {}
        for name, *found in self._rows.execute(
            "SELECT name, model_id, artifact_location, status FROM logged_models WHERE experiment_id = ? "
            "AND source_run_id = ? AND lifecycle_stage = 'active' ORDER BY creation_timestamp_ms, model_id",
            (experiment, run_id),
        ).fetchall():
            if name in batch.removed_models:
                take_away(self._directory(found[1]))
                self._delete_model(found[0])
            elif name in standing:  # a creation whose answer was lost
                self._delete_model(found[0])
            else:
                standing[name] = (found[0], found[1], found[2])
        for model in batch.models:
            made = standing.get(model.name) or self._begun_model(experiment, run_id, model)
            if made[2] != _READY:
                lay_out(model, self._directory(made[1]))
                self._finish_model(experiment, run_id, model, made[0])

    def _directory(self, place: str) -> Path:
        root = directory_of(place)
        if root is None:
            raise Refused(f"MLflow at {self.name} keeps {place} elsewhere than on this host.")
        return root

    def _begun_model(self, experiment: int, run_id: str, model: Model) -> tuple[str, str, int]:
        model_id, now = f"m-{uuid.uuid4().hex}", _now()
        with self._writing():
            place = f"{self._place(str(experiment))}/models/{model_id}/artifacts"
            self._rows.execute(
                "INSERT INTO logged_models (model_id, experiment_id, name, artifact_location, creation_timestamp_ms, "
                "last_updated_timestamp_ms, status, lifecycle_stage, source_run_id) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 'active', ?)",
                (model_id, experiment, model.name, place, now, now, _PENDING, run_id),
            )
            self._rows.executemany(
                "INSERT INTO logged_model_tags (model_id, experiment_id, tag_key, tag_value) VALUES (?, ?, ?, ?)",
                [(model_id, experiment, *tag) for tag in model.tags.items()],
            )
        return model_id, place, _PENDING

    def _finish_model(self, experiment: int, run_id: str, model: Model, model_id: str) -> None:
        with self._writing():
            self._measure(run_id, model.points)
            self._rows.executemany(
                "INSERT OR IGNORE INTO logged_model_metrics (model_id, metric_name, metric_timestamp_ms, metric_step, "
                "metric_value, experiment_id, run_id) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(model_id, p.key, p.timestamp, p.step, _stored(p.value)[0], experiment, run_id) for p in model.points],
            )
            self._rows.execute(
                "INSERT OR IGNORE INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id, "
                "step) VALUES (?, 'RUN_OUTPUT', ?, 'MODEL_OUTPUT', ?, ?)",
                (uuid.uuid4().hex, run_id, model_id, model.step),
            )
            self._rows.execute(
                "UPDATE logged_models SET status = ?, last_updated_timestamp_ms = ? WHERE model_id = ?",
                (_READY, _now(), model_id),
            )

    def _delete_model(self, model_id: str) -> None:
        with self._writing():
            self._rows.execute(
                "UPDATE logged_models SET lifecycle_stage = 'deleted', last_updated_timestamp_ms = ? "
                "WHERE model_id = ?",
                (_now(), model_id),
            )


def _plain(batch: Batch) -> bool:
    """Whether MLflow takes every name and text as it is."""
    keys = {*batch.params, *batch.tags, *(point.key for point in batch.points)}
    keys |= {key for model in batch.models for key in (*model.tags, *(point.key for point in model.points))}
    texts = [*batch.params.values(), *batch.tags.values(), *(one.place for one in batch.datasets)]
    if any(len(one.name) > 500 or len(one.field) > 500 for one in batch.datasets):
        return False
    named = all(_KEY.fullmatch(key) and posixpath.normpath(key) == key and key[0] not in "./" for key in keys)
    named = named and "mlflow.runName" not in keys and all(_NAME.fullmatch(model.name) for model in batch.models)
    return named and all(len(text) <= _TEXT for text in texts)


def _stored(value: float) -> tuple[float, bool]:
    """A value as MLflow keeps it, and whether it is NaN."""
    if math.isnan(value):
        return 0.0, True
    return (math.copysign(LARGEST, value) if math.isinf(value) else value), False


def _now() -> int:
    return int(time.time() * 1000)
