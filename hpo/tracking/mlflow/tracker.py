"""Writes studies to MLflow: one experiment per study name, a run per study, a nested run per trial.

Needs mlflow-skinny, SQLAlchemy and Alembic; full MLflow only serves the pages. It is imported on first use, since that
takes seconds. Design facts, measured with MLflow 3.17: a point sent again with the same step, timestamp and value is
stored once; parameters never change; the client repeats a POST whose answer was lost, and so makes a second run;
processes that open a new database at once race, so a lock is needed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.door import option
from hpo.errors import HpoError
from hpo.ledger.database.other_database import is_of_another
from hpo.ledger.database.sqlite_url import path_of
from hpo.ledger.database.store import read_only, writable
from hpo.text import command
from hpo.tracking.base import Batch, Deleted, ModelView, Point, Refused, Run, RunView, Unreachable
from hpo.tracking.files import digests, directory_of
from hpo.tracking.mlflow import datasets
from hpo.tracking.mlflow import edits as mlflow_edits
from hpo.tracking.mlflow.artifacts import RunArtifacts
from hpo.tracking.mlflow.client import away, opened, outages, set_up, user
from hpo.tracking.mlflow.damage import of_error
from hpo.tracking.mlflow.models import Models
from hpo.tracking.mlflow.registry import Registry
from hpo.tracking.mlflow.removal import remove_study
from hpo.tracking.mlflow.store import initialise, location
from hpo.tracking.uri import DATABASES, check_uri, tracker_name
from trainer.redaction import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE")
_TABLE = "latest_metrics"  # a table that only MLflow has
_PAGE = 1000
_ALL = 2**31 - 1


class MlflowTracker:
    """A tracker at `uri`: sqlite:///PATH or another database MLflow knows, or http(s)://SERVER.

    `artifacts` is the directory for new experiments of a database without a server. With `create` a missing SQLite
    database is created; without it the database is only read, which needs no write permission. Raises UserError as
    `check_uri` does, Unreachable if the store cannot be opened.
    """

    keeps_files = True

    def __init__(self, uri: str, artifacts: Path, *, create: bool = True) -> None:
        scheme = check_uri(uri)
        set_up()
        self.name = tracker_name(uri)
        self._uri = uri
        self._is_database, self._is_sqlite = scheme in DATABASES, scheme == "sqlite"
        self._artifacts = artifacts
        self._experiments: dict[str, str] = {}
        self._roots: dict[str, str] = {}  # run id -> artifact URI
        self._files = RunArtifacts(self.name, uri, self._is_database, self._artifact_uri, lambda: self._client)
        with self._speaking():
            if self._is_database and is_of_another(uri, _TABLE):
                raise Unreachable(
                    f"{self.name} is another program's database: make one for MLflow, and name it by "
                    f"{option('tracking_uri')}."
                )
            if scheme == "sqlite":
                database = path_of(uri) or Path()  # `check_uri` has checked that it names one
                if create:
                    initialise(database, artifacts)
                elif not database.exists():
                    raise Unreachable(f"MLflow's database {database} is gone: `{command('sync')}` makes it anew.")
                elif not writable(database):
                    # Names the driver, since MLflow makes the directory that follows a bare `sqlite:///`.
                    uri = read_only(uri, database)
            self._address, self._made = uri, create and self._is_database
            self._connect()

    def _connect(self) -> None:
        self._client  # noqa: B018  # so that a store which cannot be opened is known at once

    @cached_property
    def _client(self) -> MlflowClient:
        return opened(self._address, self._artifacts, made=self._made)

    @cached_property
    def _models(self) -> Models:
        return Models(self._client, directory_of)

    def open_study(self, study: str, run: Run) -> str:
        return self._create(self._experiment(study), run, {})

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        experiment = self._experiment(study)
        with self._speaking():
            for key, value in tags.items():
                self._client.set_experiment_tag(experiment, key, value)

    def recall(self, study: str, run_id: str) -> str:
        with self._speaking():
            experiment = self._experiment_of(run_id)
        if experiment is None:  # gone for good, so look it up by name
            return study
        self._experiments[study] = experiment.id
        if experiment.stage == "deleted":
            raise Deleted(
                f"MLflow's experiment {experiment.name!r} was deleted: `{command('sync')}` restores it, and with "
                f"{option('deleted', 'leave')} it stays so."
            )
        return experiment.name

    def _experiment_of(self, run_id: str) -> mlflow_edits.Experiment | None:
        return mlflow_edits.experiment_of(self._client, run_id)

    def restore(self, run_id: str) -> bool:
        with self._speaking():
            return mlflow_edits.restore(self._client, run_id)

    def open_trial(self, parent: str, run: Run) -> str:
        return self._create(self._experiment(run.tags["hpo.study"]), run, {"mlflow.parentRunId": parent})

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        experiment = self._known(study)
        if experiment is None:
            return []
        condition = f"tags.`hpo.run_uid` LIKE '{uid}/%'" if children else f"tags.`hpo.run_uid` = '{uid}'"
        views: list[RunView] = []
        token: str | None = None
        with self._speaking():
            while True:
                page = self._client.search_runs(
                    [experiment],
                    condition,
                    max_results=_PAGE,
                    order_by=["attributes.start_time ASC"],
                    page_token=token,
                )
                views += [self._view(run) for run in page]
                token = page.token
                if not token:
                    return views

    def send(self, run_id: str, batch: Batch) -> None:
        from mlflow.entities import Metric, Param, RunTag

        with self._speaking():
            self._files.send(run_id, batch)
            if batch.datasets:
                self._client.log_inputs(run_id, [datasets.as_input(data_set) for data_set in batch.datasets])
            self._client.log_batch(
                run_id,
                metrics=[Metric(p.key, p.value, p.timestamp, p.step) for p in batch.points],
                params=[Param(key, value) for key, value in batch.params.items()],
                tags=[RunTag(key, value) for key, value in batch.tags.items()],
            )
            mlflow_edits.remove_tags(self._client, run_id, batch.removed_tags)
            if batch.models or batch.removed_models:
                experiment = self._client.get_run(run_id).info.experiment_id
                self._models.send(experiment, run_id, batch.models, batch.removed_models)
            if batch.ended_at is not None:
                self._client.set_terminated(run_id, batch.status, batch.ended_at)
            elif batch.status is not None:
                self._client.update_run(run_id, batch.status)

    def discard(self, run_id: str) -> None:
        with self._speaking():
            self._models.discard(self._client.get_run(run_id).info.experiment_id, run_id)
            self._client.delete_run(run_id)

    def remove(self, study: str, uid: str) -> None:
        artifacts = self._artifacts if self._is_database else None
        with self._speaking():
            where = self._experiments.get(study)
            remove_study(self._client, self._models, directory_of, study, uid, own=artifacts, where=where)
        self._experiments.pop(study, None)

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        store = self._client._tracking_client.store
        with self._speaking():
            if self._is_database:  # one query per metric for many runs; a server would need one per run
                for key in sorted(set().union(*(run.keys for run in runs))):
                    ids = [run.run_id for run in runs if key in run.keys]
                    for start in range(0, len(ids), 500):
                        for m in store.get_metric_history_bulk(ids[start : start + 500], key, _ALL):
                            yield m.run_id, Point(m.key, m.step, m.timestamp, m.value)
                return
            for run in runs:
                for key in sorted(run.keys):
                    for m in self._client.get_metric_history(run.run_id, key):
                        yield run.run_id, Point(m.key, m.step, m.timestamp, m.value)

    def names(self, run_id: str) -> set[str]:
        with self._speaking():
            return mlflow_edits.names(self._client, run_id, self._files.local(run_id))

    def digests(self, run_id: str) -> dict[str, str]:
        with self._speaking():
            root = self._files.local(run_id)
            if root is not None:
                return digests(root)
            with tempfile.TemporaryDirectory() as copy:
                self._client.download_artifacts(run_id, "", copy)
                return digests(Path(copy))

    def models(self, study: str) -> list[ModelView]:
        experiment = self._known(study)
        with self._speaking():
            return [] if experiment is None else self._models.views(experiment)

    def model_digests(self, model_id: str) -> dict[str, str]:
        with self._speaking():
            return self._models.digests(model_id)

    def flush(self) -> None:
        """Does nothing: MLflow's client commits, and a server answers, only when the data is durable."""

    def registry(self) -> Registry:
        """Returns the registry of models of this MLflow."""
        return Registry(self._client, self._models, self._speaking, is_database=self._is_database)

    def close(self) -> None:
        if self._is_database and "_client" in self.__dict__:
            self._client._tracking_client.store._dispose_engine()

    def _create(self, experiment: str, run: Run, tags: dict[str, str]) -> str:
        tags = {"mlflow.user": user(), "mlflow.source.type": "LOCAL", **run.tags, **tags}
        tags |= {"mlflow.source.name": run.source} if run.source else {}
        tags |= {"mlflow.source.git.commit": run.commit} if run.commit else {}
        with self._speaking():
            run_id, self._roots[run_id] = self._made_run(experiment, run, tags)
            return run_id

    def _made_run(self, experiment: str, run: Run, tags: dict[str, str]) -> tuple[str, str]:
        """Creates a run; returns its id and the URI of its artifacts."""
        created = self._client.create_run(experiment, run.started_at, tags, run.name)
        return created.info.run_id, str(created.info.artifact_uri)

    def _experiment(self, study: str) -> str:
        """Returns the study's experiment, creating it if there is none."""
        if (known := self._known(study)) is not None:
            return known
        with self._speaking():
            artifacts = location(self._artifacts / study) if self._is_database else None
            self._experiments[study] = self._made_experiment(study, artifacts)
        return self._experiments[study]

    def _made_experiment(self, study: str, artifacts: str | None) -> str:
        return self._client.create_experiment(study, artifacts)

    def _known(self, study: str) -> str | None:
        """Returns the study's experiment, if there is one."""
        if study not in self._experiments:
            with self._speaking():
                experiment = self._experiment_named(study)
            if experiment is None:
                return None
            self._experiments[study], stage = experiment
            if stage == "deleted":
                del self._experiments[study]
                raise Unreachable(
                    f"MLflow's experiment {study!r} was deleted: restore it, or give the study another "
                    f"{option('name')}."
                )
        return self._experiments[study]

    def _experiment_named(self, study: str) -> tuple[str, str] | None:
        """Returns the id and the lifecycle stage of an experiment."""
        experiment = self._client.get_experiment_by_name(study)
        return None if experiment is None else (experiment.experiment_id, experiment.lifecycle_stage)

    def _view(self, run: Any) -> RunView:
        self._roots[run.info.run_id] = run.info.artifact_uri
        return RunView(
            run.info.run_id,
            run.data.tags["hpo.run_uid"],
            run.info.status,
            run.info.end_time,
            run.data.tags,
            run.data.params,
            frozenset(run.data.metrics),
            frozenset((data_input.dataset.name, data_input.dataset.digest) for data_input in run.inputs.dataset_inputs),
        )

    def _artifact_uri(self, run_id: str) -> str:
        if run_id not in self._roots:
            self._roots[run_id] = str(self._client.get_run(run_id).info.artifact_uri)
        return self._roots[run_id]

    @contextmanager
    def _speaking(self) -> Generator[None, None, None]:
        """Converts errors of MLflow, the network and the disk to Unreachable or Refused, in one sentence."""
        try:
            yield
        except FileNotFoundError as error:
            raise Refused(f"{error.filename} is missing.") from error
        except Exception as error:
            if isinstance(error, HpoError) or not isinstance(error, outages()):
                raise
            text = redacted(" ".join(str(error).split()))[:300]
            if self._is_sqlite and (damaged := of_error(self._uri, text)):
                raise Unreachable(damaged) from error
            if getattr(error, "error_code", None) in _REFUSALS:
                raise Refused(f"MLflow at {self.name} refuses this: {text}") from error
            raise Unreachable(away(self._uri) or f"MLflow at {self.name} cannot be used now: {text}") from error
