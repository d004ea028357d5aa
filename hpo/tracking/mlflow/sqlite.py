"""Writes MLflow's SQLite database without MLflow, whose import and client would cost more than all other work of a
mirror.

The rows are those that MLflow's own client writes; a test compares them. Only a database whose tables match the record
of the installed MLflow (`mlflow_store.py`) is written; what this module does not know, such as names that MLflow may
refuse, is left to the client. Each writing transaction first checks the revision of the tables: once another release
has migrated them, the client takes over.

A write is committed at once but reaches the disk with `flush`: SQLite in WAL mode with synchronous NORMAL keeps order
and consistency, and loses only what follows the last sync of the WAL if the machine crashes (SQLite's documentation,
"WAL", durability). A mirror moves its cursors after `flush`, so one sync serves many runs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import os
import posixpath
import re
import sqlite3
import uuid
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hpo.ledger.database.sqlite_url import path_of
from hpo.tracking.base import Batch, Dataset, Refused, Run, RunView, Unreachable
from hpo.tracking.mlflow.datasets import CONTEXT, source_of
from hpo.tracking.mlflow.edits import Experiment
from hpo.tracking.mlflow.model_rows import ModelRows
from hpo.tracking.mlflow.point_rows import milliseconds, write_points
from hpo.tracking.mlflow.store import REVISION, recorded
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.uri import check_uri

_MADE = ("points", "params", "tags", "texts", "files", "datasets", "models", "status", "ended_at")
_REMOVED = ("removed", "removed_models", "removed_tags")
_KEY, _NAME = re.compile(r"[\w.\- :/]{1,250}"), re.compile(r"[\w-]{1,250}")  # the names that MLflow accepts unchanged
_TEXT = 5000  # characters that MLflow never cuts


def open_mlflow(uri: str, artifacts: Path) -> MlflowTracker:
    """Opens MLflow at `uri` for writing: by this module if possible, else by MLflow's client."""
    check_uri(uri)
    return (SqliteTracker if _known(uri) else MlflowTracker)(uri, artifacts)


def _known(uri: str) -> bool:
    """Returns whether `uri` is a SQLite database that this module writes, or would write once it exists."""
    database = path_of(uri) if uri.startswith("sqlite") else None
    if database is None or not recorded():
        return False
    try:
        if not database.exists() or not database.stat().st_size:
            return True
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            return _revisions(connection) == [(REVISION,)]
    except (OSError, sqlite3.Error):
        return False  # the client reports the fault


def _revisions(connection: sqlite3.Connection) -> list[tuple[str]]:
    return connection.execute("SELECT version_num FROM alembic_version").fetchall()


class SqliteTracker(MlflowTracker):
    """A tracker at `sqlite:///PATH` with the recorded tables."""

    def _connect(self) -> None:
        database = path_of(self._address) or Path()
        self._rows = sqlite3.connect(database, timeout=60, check_same_thread=False, isolation_level=None)
        self._rows.execute("PRAGMA synchronous = NORMAL")
        self._wal = Path(f"{database}-wal")
        self._model_rows = ModelRows(self._rows, self._writing, self._location, self.name)

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        experiment = self._known(study)
        operator, named = ("GLOB", f"{uid}/*") if children else ("=", uid)
        with self._speaking():
            rows = self._rows.execute(
                "SELECT run_uuid, status, end_time, artifact_uri FROM runs WHERE experiment_id = ? AND lifecycle_stage "
                "= 'active' AND run_uuid IN (SELECT run_uuid FROM tags WHERE key = 'hpo.run_uid' AND "
                f"value {operator} ?) "
                "ORDER BY start_time, run_uuid",
                (experiment, named),
            ).fetchall()
            return [self._run_view(*row) for row in rows]

    def _run_view(self, run_id: str, status: str, ended_at: int | None, uri: str) -> RunView:
        self._roots[run_id] = uri
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
        unknown = replace(batch, **{name: getattr(Batch(), name) for name in (*_MADE, *_REMOVED)})
        if unknown != Batch() or not _plain(batch):
            return super().send(run_id, batch)
        with self._speaking():
            experiment = self._active(run_id, batch.params)
            self._files.send(run_id, batch)
            self._model_rows.send(experiment, run_id, batch)
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
    def _speaking(self) -> Generator[None, None, None]:
        """Converts errors to sentences, as the base class does.

        A call that meets migrated tables raises Unreachable; from then on the client makes all calls.
        """
        try:
            with super()._speaking():
                yield
        except Unreachable:
            with suppress(sqlite3.Error):  # the database is unreachable
                if _revisions(self._rows) != [(REVISION,)]:
                    self._rows.close()
                    self.__class__ = MlflowTracker  # pyright: ignore[reportAttributeAccessIssue]
            raise

    @contextmanager
    def _writing(self) -> Generator[None, None, None]:
        try:
            self._rows.execute("BEGIN IMMEDIATE")
            if (revisions := _revisions(self._rows)) != [(REVISION,)]:
                raise Unreachable(
                    f"the tables of MLflow at {self.name} were migrated to {revisions}: MLflow's client goes on there."
                )
            yield
            self._rows.execute("COMMIT")
        except BaseException:
            if self._rows.in_transaction:
                self._rows.execute("ROLLBACK")
            raise

    def _made_run(self, experiment: str, run: Run, tags: dict[str, str]) -> tuple[str, str]:
        run_id = uuid.uuid4().hex
        with self._writing():
            location = f"{self._location(experiment)}/{run_id}/artifacts"
            self._rows.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status, "
                "start_time, source_version, lifecycle_stage, artifact_uri, experiment_id) "
                "VALUES (?, ?, 'UNKNOWN', '', '', ?, 'RUNNING', ?, '', 'active', ?, ?)",
                (run_id, run.name, tags["mlflow.user"], run.started_at, location, experiment),
            )
            self._tag(run_id, {**tags, "mlflow.runName": run.name})
        return run_id, location

    def _location(self, experiment: str) -> str:
        """Returns the artifact location of an experiment; raises Refused if the experiment is deleted."""
        [(location, stage)] = self._rows.execute(
            "SELECT artifact_location, lifecycle_stage FROM experiments WHERE experiment_id = ?", (experiment,)
        ).fetchall() or [("", "gone")]
        if stage != "active":
            raise Refused(f"MLflow at {self.name} refuses this: experiment {experiment} is {stage}.")
        return location

    def _made_experiment(self, study: str, artifacts: str | None) -> str:
        with self._writing():
            now = milliseconds()
            cursor = self._rows.execute(
                "INSERT INTO experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time, "
                "workspace) VALUES (?, ?, 'active', ?, ?, 'default')",
                (study, artifacts, now, now),
            )
        return str(cursor.lastrowid)

    def _experiment_named(self, study: str) -> tuple[str, str] | None:
        row = self._rows.execute(
            "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ? AND workspace = 'default'", (study,)
        ).fetchone()
        return None if row is None else (str(row[0]), row[1])

    def _experiment_of(self, run_id: str) -> Experiment | None:
        row = self._rows.execute(
            "SELECT experiment_id, experiments.name, experiments.lifecycle_stage FROM runs JOIN experiments "
            "USING (experiment_id) WHERE run_uuid = ?",
            (run_id,),
        ).fetchone()
        return None if row is None else Experiment(str(row[0]), *row[1:])

    def _artifact_uri(self, run_id: str) -> str:
        if run_id not in self._roots:
            [(uri,)] = self._rows.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", (run_id,))
            self._roots[run_id] = uri
        return self._roots[run_id]

    def _active(self, run_id: str, params: Mapping[str, str]) -> int:
        """Returns the experiment of a run.

        Raises Refused unless it is active and shows no other value for one of `params`.
        """
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
        write_points(self._rows, run_id, batch.points)
        self._tag(run_id, batch.tags)
        removed = [(run_id, key) for key in batch.removed_tags]
        self._rows.executemany("DELETE FROM tags WHERE run_uuid = ? AND key = ?", removed)
        for data_set in batch.datasets:
            self._read(experiment, run_id, data_set)
        if batch.ended_at is not None:
            end = (batch.status or "FINISHED", batch.ended_at, run_id)
            self._rows.execute("UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?", end)
        elif batch.status is not None:
            self._rows.execute("UPDATE runs SET status = ? WHERE run_uuid = ?", (batch.status, run_id))

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._rows.executemany(
            "INSERT OR REPLACE INTO tags (run_uuid, key, value) VALUES (?, ?, ?)",
            [(run_id, *tag) for tag in tags.items()],
        )

    def _read(self, experiment: int, run_id: str, one: Dataset) -> None:
        """Records that a run has read a data set, which an experiment stores once."""
        new = (uuid.uuid4().hex, experiment, one.name, one.digest, "local", source_of(one), one.profile)
        self._rows.execute(
            "INSERT OR IGNORE INTO datasets (dataset_uuid, experiment_id, name, digest, dataset_source_type, "
            "dataset_source, dataset_profile) VALUES (?, ?, ?, ?, ?, ?, ?)",
            new,
        )
        data_set = "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?"
        [(dataset,)] = self._rows.execute(data_set, new[1:4]).fetchall()
        input_uuid = uuid.uuid4().hex
        inserted = self._rows.execute(
            "INSERT OR IGNORE INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id) "
            "VALUES (?, 'DATASET', ?, 'RUN', ?)",
            (input_uuid, dataset, run_id),
        )
        if inserted.rowcount:
            of_input = (input_uuid, CONTEXT, one.field)
            self._rows.execute("INSERT INTO input_tags (input_uuid, name, value) VALUES (?, ?, ?)", of_input)


def _plain(batch: Batch) -> bool:
    """Returns whether MLflow accepts every name and text unchanged."""
    keys = {*batch.params, *batch.tags, *(point.key for point in batch.points)}
    keys |= {key for model in batch.models for key in (*model.tags, *(point.key for point in model.points))}
    texts = [*batch.params.values(), *batch.tags.values(), *(data_set.place for data_set in batch.datasets)]
    if any(len(data_set.name) > 500 or len(data_set.field) > 500 for data_set in batch.datasets):
        return False
    named = all(_KEY.fullmatch(key) and posixpath.normpath(key) == key and key[0] not in "./" for key in keys)
    named = named and "mlflow.runName" not in keys and all(_NAME.fullmatch(model.name) for model in batch.models)
    return named and all(len(text) <= _TEXT for text in texts)
