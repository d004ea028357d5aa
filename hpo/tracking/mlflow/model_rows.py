"""Writes the logged models of a run into MLflow's SQLite database."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hpo.tracking.base import Batch, Model, Refused
from hpo.tracking.files import directory_of
from hpo.tracking.mlflow.models import lay_out, take_away
from hpo.tracking.mlflow.point_rows import milliseconds, stored, write_points

_PENDING, _READY = 1, 2  # values of mlflow.entities.LoggedModelStatus
_TAG = "INSERT INTO logged_model_tags (model_id, experiment_id, tag_key, tag_value) VALUES (?, ?, ?, ?)"


class ModelRows:
    """Writes the models in the tables of the MLflow called `name`.

    `writing` opens a transaction, and `location_of` returns the artifact location of an experiment.
    """

    def __init__(
        self,
        rows: sqlite3.Connection,
        writing: Callable[[], AbstractContextManager[None]],
        location_of: Callable[[str], str],
        name: str,
    ) -> None:
        self._rows, self._writing, self._location_of, self._name = rows, writing, location_of, name

    def send(self, experiment: int, run_id: str, batch: Batch) -> None:
        """Adds and removes the models of a run; each step can be repeated."""
        if not (batch.models or batch.removed_models):
            return
        standing: dict[str, tuple[str, str, int]] = {}
        for name, *row in self._rows.execute(
            "SELECT name, model_id, artifact_location, status FROM logged_models WHERE experiment_id = ? "
            "AND source_run_id = ? AND lifecycle_stage = 'active' ORDER BY creation_timestamp_ms, model_id",
            (experiment, run_id),
        ).fetchall():
            if name in batch.removed_models:
                take_away(self._directory(row[1]))
                self._delete(row[0])
            elif name in standing:  # a creation whose answer was lost
                self._delete(row[0])
            else:
                standing[name] = (row[0], row[1], row[2])
        for model in batch.models:
            model_id, location, status = standing.get(model.name) or self._begun(experiment, run_id, model)
            if status != _READY:
                lay_out(model, self._directory(location))
                self._finish(experiment, run_id, model, model_id)
            else:
                self._tag(experiment, model, model_id)

    def _directory(self, location: str) -> Path:
        root = directory_of(location)
        if root is None:
            raise Refused(f"MLflow at {self._name} keeps {location} elsewhere than on this host.")
        return root

    def _begun(self, experiment: int, run_id: str, model: Model) -> tuple[str, str, int]:
        model_id, now = f"m-{uuid.uuid4().hex}", milliseconds()
        with self._writing():
            location = f"{self._location_of(str(experiment))}/models/{model_id}/artifacts"
            self._rows.execute(
                "INSERT INTO logged_models (model_id, experiment_id, name, artifact_location, creation_timestamp_ms, "
                "last_updated_timestamp_ms, status, lifecycle_stage, source_run_id) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 'active', ?)",
                (model_id, experiment, model.name, location, now, now, _PENDING, run_id),
            )
            self._rows.executemany(_TAG, [(model_id, experiment, *tag) for tag in model.tags.items()])
        return model_id, location, _PENDING

    def _tag(self, experiment: int, model: Model, model_id: str) -> None:
        """Brings the platform's tags of a finished model up to date: another one may be the best or the last by now."""
        of_model = "FROM logged_model_tags WHERE model_id = ? AND tag_key LIKE 'hpo.%'"
        if dict(self._rows.execute(f"SELECT tag_key, tag_value {of_model}", (model_id,))) == dict(model.tags):
            return
        with self._writing():
            self._rows.execute(f"DELETE {of_model}", (model_id,))
            self._rows.executemany(_TAG, [(model_id, experiment, *tag) for tag in model.tags.items()])

    def _finish(self, experiment: int, run_id: str, model: Model, model_id: str) -> None:
        with self._writing():
            write_points(self._rows, run_id, model.points)
            self._rows.executemany(
                "INSERT OR IGNORE INTO logged_model_metrics (model_id, metric_name, metric_timestamp_ms, metric_step, "
                "metric_value, experiment_id, run_id) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(model_id, p.key, p.timestamp, p.step, stored(p.value)[0], experiment, run_id) for p in model.points],
            )
            self._rows.execute(
                "INSERT OR IGNORE INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id, "
                "step) VALUES (?, 'RUN_OUTPUT', ?, 'MODEL_OUTPUT', ?, ?)",
                (uuid.uuid4().hex, run_id, model_id, model.step),
            )
            self._rows.execute(
                "UPDATE logged_models SET status = ?, last_updated_timestamp_ms = ? WHERE model_id = ?",
                (_READY, milliseconds(), model_id),
            )

    def _delete(self, model_id: str) -> None:
        with self._writing():
            self._rows.execute(
                "UPDATE logged_models SET lifecycle_stage = 'deleted', last_updated_timestamp_ms = ? "
                "WHERE model_id = ?",
                (milliseconds(), model_id),
            )
