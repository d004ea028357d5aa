"""Takes a study out of MLflow: its runs, their models and files, and the experiment where nothing else is in it.

MLflow's own deletion of a run keeps its rows and files. In a database they go for good, as by `mlflow gc`; a server
offers no more than the deletion, so there the files go and the runs are hidden, and the experiment, whose name would
otherwise be taken for ever, is renamed before it is deleted. Each step may be done again: a run's files go before it
does, so whatever a kill leaves is found by the tag of its run.

The rows of a home that was copied or moved name files of the home that they were made in, which may stand and be in
use: of a database only what lies in this home's own artifacts is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from hpo.tracking.mlflow_models import Models

_PAGE = 1000


def remove_study(
    client: MlflowClient,
    models: Models,
    directory: Callable[[str], Path | None],
    name: str,
    uid: str,
    *,
    own: Path | None,
) -> None:
    """Remove every run that stands under `uid` in the experiment `name`. Of a database `own` is the directory of the
    experiments that this home has made; None of a server.

    `directory` gives the local directory behind an artifact URI, if there is one. Runs of others, such as a study of
    the same name in another home, and with them the experiment, stay.
    """
    for_ever = own is not None
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return
    where, store = experiment.experiment_id, client._tracking_client.store
    for run in [*_runs(client, where, f"LIKE '{uid}/%'", for_ever), *_runs(client, where, f"= '{uid}'", for_ever)]:
        models.remove(where, run.info.run_id, own=own)
        _remove_files(client, directory(run.info.artifact_uri), run, own)
        if for_ever:
            store._hard_delete_run(run.info.run_id)
        else:
            client.delete_run(run.info.run_id)
    if next(_runs(client, where, "", for_ever), None) is not None:
        return
    if own is not None and (own / name).exists():
        shutil.rmtree(own / name)
    if experiment.lifecycle_stage == "active":
        if not for_ever:
            client.rename_experiment(where, f"{name} removed {uid}")
        client.delete_experiment(where)
    if for_ever:
        store._hard_delete_experiment(where)


def _runs(client: MlflowClient, experiment: str, uid: str, every: bool) -> Iterator[Any]:
    """The runs whose uid is like that, or all; those that were deleted, too, if `every` one is meant."""
    from mlflow.entities import ViewType

    which, token = f"tags.`hpo.run_uid` {uid}" if uid else "", None
    while True:
        view = ViewType.ALL if every else ViewType.ACTIVE_ONLY
        page = client.search_runs([experiment], which, view, _PAGE, page_token=token)
        yield from list(page)
        token = page.token
        if not token:
            return


def _remove_files(client: MlflowClient, root: Path | None, run: Any, own: Path | None) -> None:
    """The run's artifacts; of a local store the directory that it has for itself."""
    if root is None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        get_artifact_repository(run.info.artifact_uri, client.tracking_uri).delete_artifacts()
        return
    directory = root.parent if root.parent.name == run.info.run_id else root
    if directory.exists() and (own is None or directory.is_relative_to(own)):
        shutil.rmtree(directory)
