"""Removes a study from MLflow: its runs, their models and files, and the experiment if nothing else is in it.

MLflow's own deletion of a run keeps its rows and files. A database loses them for good, as with `mlflow gc`. A server
offers only the deletion: the files go and the runs are hidden, and the experiment is renamed before it is deleted,
since its name would otherwise be taken for ever. Each step can be repeated: a run's files go before the run does, so
the tag of the run finds whatever a kill leaves.

In a home that was copied or moved, rows may name files of the original home, which may still be in use: of a database
only files in this home's own artifacts are removed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from hpo.tracking.mlflow.models import Models

_PAGE = 1000


def remove_study(
    client: MlflowClient,
    models: Models,
    directory: Callable[[str], Path | None],
    name: str,
    uid: str,
    *,
    own: Path | None,
    where: str | None = None,
) -> None:
    """Removes every run under `uid` in the experiment `name`, or in the one with the id `where`.

    For a database `own` is the directory of the experiments that this home has made; None for a server. `directory`
    returns the local directory of an artifact URI, if there is one. Other runs, such as those of a study with the same
    name in another home, stay, and so does their experiment.
    """
    for_ever = own is not None
    experiment = client.get_experiment_by_name(name) if where is None else client.get_experiment(where)
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
    """Yields the runs whose uid matches; with `every`, all runs, deleted ones too."""
    from mlflow.entities import ViewType

    condition, token = f"tags.`hpo.run_uid` {uid}" if uid else "", None
    while True:
        view = ViewType.ALL if every else ViewType.ACTIVE_ONLY
        page = client.search_runs([experiment], condition, view, _PAGE, page_token=token)
        yield from list(page)
        token = page.token
        if not token:
            return


def _remove_files(client: MlflowClient, root: Path | None, run: Any, own: Path | None) -> None:
    """Removes the run's artifacts; in a local store also the run's own directory."""
    if root is None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        get_artifact_repository(run.info.artifact_uri, client.tracking_uri).delete_artifacts()
        return
    directory = root.parent if root.parent.name == run.info.run_id else root
    if directory.exists() and (own is None or directory.is_relative_to(own)):
        shutil.rmtree(directory)
