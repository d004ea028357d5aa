"""Stores checkpoints as MLflow's models: `LoggedModel`s without a flavor, since nothing is pickled.

Every step of making one can be repeated: a model is found by its run and name, files are linked by name, points have
the run's own timestamps, an output is looked up before it is recorded, and READY is set last. So a kill leaves a
PENDING model, which the next mirror finishes. Measured with MLflow 3.17 on SQLite: four writes per model, each about as
expensive as creating a run.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
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
    """Handles the models of one client; `directory` returns the local directory of an artifact URI, if there is one."""

    def __init__(self, client: MlflowClient, directory: Callable[[str], Path | None]) -> None:
        self._client, self._directory = client, directory

    def send(self, experiment: str, run_id: str, models: Sequence[Model], removed: Sequence[str] = ()) -> None:
        """Makes the models that are not finished yet, and removes those named."""
        models_by_name: dict[str, Any] = {}
        for model in self._search(experiment, run_id):
            if model.name in removed:
                self._remove(model)
            elif models_by_name.setdefault(model.name, model) is not model:  # a creation whose answer was lost
                self._client.delete_logged_model(model.model_id)
        for model in models:
            logged = models_by_name.get(model.name) or self._client.create_logged_model(
                experiment, model.name, run_id, dict(model.tags)
            )
            if str(logged.status) != "READY":
                self._finish(run_id, model, logged)
            else:
                self._tag(model, logged)

    def named(self, experiment: str, run_id: str, name: str) -> Any:
        """Returns the model with that name of a run, as MLflow stores it."""
        return next(model for model in self._search(experiment, run_id) if model.name == name)

    def _tag(self, model: Model, made: Any) -> None:
        """Brings the platform's tags of a finished model up to date: another one may be the best or the last by now."""
        shown = {key: value for key, value in made.tags.items() if key.startswith("hpo.")}
        for key in shown.keys() - model.tags.keys():
            self._client.delete_logged_model_tag(made.model_id, key)
        if any(shown.get(key) != value for key, value in model.tags.items()):
            self._client.set_logged_model_tags(made.model_id, dict(model.tags))

    def _finish(self, run_id: str, model: Model, made: Any) -> None:
        from mlflow.entities import LoggedModelOutput, Metric

        self._add_files(model, made)
        points = [Metric(p.key, p.value, p.timestamp, p.step, model_id=made.model_id) for p in model.points]
        if points:
            self._client.log_batch(run_id, metrics=points)
        recorded = self._client.get_run(run_id).outputs
        if made.model_id not in {output.model_id for output in (recorded.model_outputs if recorded else ())}:
            self._client.log_outputs(run_id, [LoggedModelOutput(made.model_id, model.step)])
        self._client.finalize_logged_model(made.model_id, "READY")

    def _remove(self, made: Any) -> None:
        """Removes a model, its files first, which MLflow's own deletion leaves, so that a killed removal is found
        again."""
        root = self._directory(made.artifact_location)
        if root is not None:
            take_away(root)
        else:
            self._repository(made.artifact_location).delete_artifacts()
        self._client.delete_logged_model(made.model_id)

    def _repository(self, location: str) -> Any:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(location, self._client.tracking_uri)

    def _add_files(self, model: Model, made: Any) -> None:
        root = self._directory(made.artifact_location)
        if root is not None:
            lay_out(model, root)
            return
        with tempfile.TemporaryDirectory() as copy:
            lay_out(model, Path(copy))
            self._client.log_model_artifacts(made.model_id, copy)

    def views(self, experiment: str) -> list[ModelView]:
        """Returns the models of every run of an experiment."""
        return [
            ModelView(
                model.model_id,
                model.source_run_id or "",
                model.name,
                str(model.status) == "READY",
                model.tags,
                frozenset(Point(m.key, m.step, m.timestamp, m.value) for m in model.metrics or ()),
            )
            for model in self._search(experiment)
        ]

    def digests(self, model_id: str) -> dict[str, str]:
        """Returns name -> sha256 of every file of a model."""
        location = self._client.get_logged_model(model_id).artifact_location
        root = self._directory(location)
        if root is not None:
            return digests(root)
        with tempfile.TemporaryDirectory() as copy:
            self._repository(location).download_artifacts("", copy)
            return digests(Path(copy))

    def discard(self, experiment: str, run_id: str) -> None:
        """Deletes the models of a run."""
        for model in self._search(experiment, run_id):
            self._client.delete_logged_model(model.model_id)

    def remove(self, experiment: str, run_id: str, *, own: Path | None) -> None:
        """Removes the models of a run; in a database also their rows.

        It then removes their files that lie in `own`, the artifacts of this home.
        """
        for model in self._search(experiment, run_id):
            root = self._directory(model.artifact_location)
            if own is None or root is None or root.is_relative_to(own):
                self._remove(model)
            if own is not None:
                self._client._tracking_client.store._hard_delete_logged_model(model.model_id)

    def _search(self, experiment: str, run_id: str | None = None) -> list[Any]:
        """Returns the models of a run, or of all runs, oldest first."""
        condition = None if run_id is None else f"source_run_id = '{run_id}'"
        order = [{"field_name": "creation_timestamp", "ascending": True}]
        models: list[Any] = []
        token: str | None = None
        while True:
            page = self._client.search_logged_models([experiment], condition, order_by=order, page_token=token)
            models += page
            token = page.token
            if not token:
                return models


def take_away(root: Path) -> None:
    """Removes the files of a model, if there are any."""
    shutil.rmtree(root, ignore_errors=not root.exists())


def lay_out(model: Model, root: Path) -> None:
    """Links the files of a model into its directory."""
    for name, source in model.files.items():
        link(source, root / name)
    for name, text in model.texts.items():
        write_text(root / name, text)
