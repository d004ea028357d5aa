"""Finds what people have renamed, moved or deleted in MLflow's pages, and restores it.

Deletion in MLflow only hides: a deleted run keeps its values, files and notes until somebody runs `mlflow gc`. A
deleted experiment keeps its name too, so no other experiment can have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ABSENT = "RESOURCE_DOES_NOT_EXIST"


class Experiment(NamedTuple):
    """An experiment with its current name; `stage` is active or deleted."""

    id: str
    name: str
    stage: str


def experiment_of(client: MlflowClient, run_id: str) -> Experiment | None:
    """Returns the experiment of a run, even a deleted one; None if the run is gone for good."""
    from mlflow.exceptions import MlflowException

    try:
        experiment = client.get_experiment(client.get_run(run_id).info.experiment_id)
    except MlflowException as error:
        if error.error_code == _ABSENT:
            return None
        raise
    return Experiment(experiment.experiment_id, experiment.name, experiment.lifecycle_stage)


def restore(client: MlflowClient, run_id: str) -> bool:
    """Restores a run, and its experiment if that was deleted; returns False if the run is gone for good."""
    experiment = experiment_of(client, run_id)
    if experiment is None:
        return False
    if experiment.stage == "deleted":
        client.restore_experiment(experiment.id)
    if client.get_run(run_id).info.lifecycle_stage == "deleted":
        client.restore_run(run_id)
    return True


def names(client: MlflowClient, run_id: str, root: Path | None) -> set[str]:
    """Returns the names of a run's artifact files; `root` is their directory if that is on this host."""
    if root is not None:
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    files, directories = set[str](), [""]
    while directories:
        for entry in client.list_artifacts(run_id, directories.pop() or None):  # pyright: ignore[reportUnknownMemberType]
            directories.extend([entry.path] * entry.is_dir)
            files |= set() if entry.is_dir else {entry.path}
    return files


def remove_tags(client: MlflowClient, run_id: str, keys: Sequence[str]) -> None:
    """Removes those tags of a run that exist: MLflow refuses to remove any other."""
    present = client.get_run(run_id).data.tags if keys else {}
    for key in (key for key in keys if key in present):
        client.delete_tag(run_id, key)
