"""Checkpoints as MLflow's models: `LoggedModel`s without a flavor, since nothing of ours is pickled.

Every step of making one can be done again: it is found by its run and name, files are linked by name, points have the
run's own timestamps, an output is looked for before it is recorded, and READY is set last. So what a kill leaves is
PENDING, and the next mirror finishes it. Measured with MLflow 3.17 on SQLite: four writes a model, each about as dear
as creating a run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.tracking.base import Model, ModelView, Point
from hpo.tracking.files import digests, link
from trainer.files.durable import write_text

if TYPE_CHECKING:
    from mlflow import MlflowClient


class Models:
    """The models of one client; `directory` gives the local directory behind an artifact URI, if there is one."""

    def __init__(self, client: MlflowClient, directory: Callable[[str], Path | None]) -> None:
        self._client, self._directory = client, directory

    def send(self, experiment: str, run_id: str, models: Sequence[Model], removed: Sequence[str] = ()) -> None:
        """Make those that are not finished yet, and remove those named."""
        found: dict[str, Any] = {}
        for one in self._search(experiment, run_id):
            if one.name in removed:
                self._remove(one)
            elif found.setdefault(one.name, one) is not one:  # a creation whose answer was lost
                self._client.delete_logged_model(one.model_id)
        for model in models:
            made = found.get(model.name) or self._client.create_logged_model(
                experiment, model.name, run_id, dict(model.tags)
            )
            if str(made.status) != "READY":
                self._finish(run_id, model, made)

    def named(self, experiment: str, run_id: str, name: str) -> Any:
        """The model of that name that a run has, as MLflow holds it."""
        return next(one for one in self._search(experiment, run_id) if one.name == name)

    def _finish(self, run_id: str, model: Model, made: Any) -> None:
        from mlflow.entities import LoggedModelOutput, Metric

        self._add_files(model, made)
        points = [Metric(p.key, p.value, p.timestamp, p.step, model_id=made.model_id) for p in model.points]
        if points:
            self._client.log_batch(run_id, metrics=points)
        recorded = self._client.get_run(run_id).outputs
        if made.model_id not in {one.model_id for one in (recorded.model_outputs if recorded else ())}:
            self._client.log_outputs(run_id, [LoggedModelOutput(made.model_id, model.step)])
        self._client.finalize_logged_model(made.model_id, "READY")

    def _remove(self, made: Any) -> None:
        """The files first, which MLflow's own deletion leaves; after a kill in between, the model is found again."""
        root = self._directory(made.artifact_location)
        if root is not None:
            take_away(root)
        else:
            self._repository(made.artifact_location).delete_artifacts()
        self._client.delete_logged_model(made.model_id)

    def _repository(self, place: str) -> Any:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(place, self._client.tracking_uri)

    def _add_files(self, model: Model, made: Any) -> None:
        root = self._directory(made.artifact_location)
        if root is not None:
            lay_out(model, root)
            return
        with tempfile.TemporaryDirectory() as copy:
            lay_out(model, Path(copy))
            self._client.log_model_artifacts(made.model_id, copy)

    def views(self, experiment: str) -> list[ModelView]:
        """Those of every run."""
        return [
            ModelView(
                one.model_id,
                one.source_run_id or "",
                one.name,
                str(one.status) == "READY",
                one.tags,
                frozenset(Point(m.key, m.step, m.timestamp, m.value) for m in one.metrics or ()),
            )
            for one in self._search(experiment)
        ]

    def digests(self, model_id: str) -> dict[str, str]:
        """Name -> sha256 of every file of a model."""
        place = self._client.get_logged_model(model_id).artifact_location
        root = self._directory(place)
        if root is not None:
            return digests(root)
        with tempfile.TemporaryDirectory() as copy:
            self._repository(place).download_artifacts("", copy)
            return digests(Path(copy))

    def discard(self, experiment: str, run_id: str) -> None:
        """Delete the models of a run."""
        for one in self._search(experiment, run_id):
            self._client.delete_logged_model(one.model_id)

    def remove(self, experiment: str, run_id: str, *, own: Path | None) -> None:
        """Remove the models of a run; from a database their rows as well, and of their files those that lie in `own`,
        the artifacts of this home."""
        for one in self._search(experiment, run_id):
            root = self._directory(one.artifact_location)
            if own is None or root is None or root.is_relative_to(own):
                self._remove(one)
            if own is not None:
                self._client._tracking_client.store._hard_delete_logged_model(one.model_id)

    def _search(self, experiment: str, run_id: str | None = None) -> list[Any]:
        """Oldest first."""
        which = None if run_id is None else f"source_run_id = '{run_id}'"
        order = [{"field_name": "creation_timestamp", "ascending": True}]
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self._client.search_logged_models([experiment], which, order_by=order, page_token=token)
            found += page
            token = page.token
            if not token:
                return found


def take_away(root: Path) -> None:
    """Remove the files of a model, if any are there."""
    shutil.rmtree(root, ignore_errors=not root.exists())


def lay_out(model: Model, root: Path) -> None:
    """Give a model its files."""
    for name, source in model.files.items():
        link(source, root / name)
    for name, text in model.texts.items():
        write_text(root / name, text)
