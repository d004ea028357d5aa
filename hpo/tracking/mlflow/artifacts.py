"""Sends and removes the artifacts of runs in MLflow: directly if they are on this host, else by MLflow's client."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hpo.terminal import print
from hpo.tracking.base import Batch, Unreachable
from hpo.tracking.files import directory_of, link
from hpo.tracking.uri import loopback
from trainer.files.durable import write_text

if TYPE_CHECKING:
    from mlflow import MlflowClient


class RunArtifacts:
    """Handles the artifacts of runs in the MLflow called `name` at `tracking_uri`; `is_database` is False for a server.

    `uri_of(run_id)` returns the artifact URI of a run. `client` is called only if that is not on this host.
    """

    def __init__(
        self,
        name: str,
        tracking_uri: str,
        is_database: bool,
        uri_of: Callable[[str], str],
        client: Callable[[], MlflowClient],
    ) -> None:
        self._name, self._tracking_uri, self._is_database = name, tracking_uri, is_database
        self._uri_of, self._client = uri_of, client

    def send(self, run_id: str, batch: Batch) -> None:
        """Writes the texts and files of a batch, and deletes those that it removes."""
        if not (batch.texts or batch.files or batch.removed):
            return
        root = self.local(run_id)
        for name in batch.removed:
            self._take_away(run_id, name, root)
        for name, text in batch.texts.items():
            if root is not None:
                write_text(root / name, text)
            else:
                self._client().log_text(run_id, text, name)
        for name, source in batch.files.items():
            try:
                link(source, root / name) if root is not None else _upload(self._client(), run_id, name, source)
            except FileNotFoundError:
                if source.exists():
                    raise
                # Retention records a removal before it removes: the row for it comes next. Leave no partial artifact.
                self._take_away(run_id, name, root)
                print(f"{source} is gone; it is not mirrored.", flush=True)

    def local(self, run_id: str) -> Path | None:
        """Returns the run's artifact directory if it is on this host, else None."""
        root = directory_of(self._uri_of(run_id))
        if root is None:
            return None
        if not self._is_database and not loopback(self._name) and not root.parents[1].exists():
            raise Unreachable(
                f"MLflow at {self._name} keeps artifacts in {root.parents[1]} on its own host: start it with "
                "--serve-artifacts, or give both hosts that directory."
            )
        return root

    def _take_away(self, run_id: str, name: str, root: Path | None) -> None:
        if root is not None:
            shutil.rmtree(root / name, ignore_errors=not (root / name).exists())
        elif self._client().list_artifacts(run_id, name):
            _delete(self._uri_of(run_id), self._tracking_uri, name)


def _upload(client: MlflowClient, run_id: str, name: str, source: Path) -> None:
    """Sends a file or a directory as the artifact `name`."""
    if source.is_dir():
        client.log_artifacts(run_id, str(source), name)
        return
    with tempfile.TemporaryDirectory() as copy:  # the client keeps the file's own name
        named = Path(copy) / PurePosixPath(name).name
        shutil.copyfile(source, named)
        parent = str(PurePosixPath(name).parent)
        client.log_artifact(run_id, str(named), None if parent == "." else parent)


def _delete(artifacts: str, tracking_uri: str, name: str) -> None:
    """Deletes the artifact `name` below the URI `artifacts` of a run."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    get_artifact_repository(artifacts, tracking_uri).delete_artifacts(name)
