"""MLflow as a tracker: one experiment per study name, a run per study, a nested run per trial.

Needs mlflow-skinny, SQLAlchemy and Alembic; full MLflow only serves the pages. It is imported on first use, since that
takes seconds. Facts behind the choices here, measured with MLflow 3.17: a point sent again with the same step,
timestamp and value is stored once; parameters never change; the client repeats a POST whose answer was lost, and so
makes a second run; the first opening of a new database is a race that only a lock decides.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hpo.errors import HpoError
from hpo.ledger.other_database import is_of_another
from hpo.ledger.sqlite_url import path_of
from hpo.ledger.store import DATABASE_ERRORS, read_only, writable
from hpo.terminal import print
from hpo.text import command
from hpo.tracking import datasets
from hpo.tracking.base import Batch, ModelView, Point, Refused, Run, RunView, Unreachable
from hpo.tracking.damage import of_error
from hpo.tracking.files import digests, directory_of, link
from hpo.tracking.mlflow_models import Models
from hpo.tracking.mlflow_registry import Registry
from hpo.tracking.mlflow_removal import remove_study
from hpo.tracking.mlflow_store import initialise, location, locked
from hpo.tracking.uri import DATABASES, check_uri, loopback, tracker_name
from trainer.files.durable import write_text
from trainer.redaction import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE")
_TABLE = "latest_metrics"  # of MLflow alone
_PAGE = 1000
_ALL = 2**31 - 1

# Read by MLflow at each call. An unanswered POST must not be repeated behind our back, nor may a dead server hold the
# mirror for minutes.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def silence(uri: str, seconds: float = 1.0) -> str:
    """What to tell the user of a server that does not answer now; "" if it does, or if `uri` is a database."""
    away = _away(uri, seconds)
    more = "training goes on, and it is sent everything once it is back, by this run, the next, or"
    return f"{away}: {more} `{command('sync')}`." if away else ""


def _away(uri: str, seconds: float = 1.0) -> str:
    """That a server does not answer now, and why; "" if it does, or if `uri` is a database."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), seconds).close()
        return ""
    except OSError as error:
        return f"MLflow at {tracker_name(uri)} does not answer now ({error.strerror or error})"


class MlflowTracker:
    """A tracker at `uri`: sqlite:///PATH or another database MLflow knows, or http(s)://SERVER.

    `artifacts` is the directory for new experiments of a database without a server. With `create` a missing SQLite
    database is made; without, it is only read, also by one who may not write it. Raises UserError as `check_uri` does,
    Unreachable when the store cannot be opened.
    """

    keeps_files = True

    def __init__(self, uri: str, artifacts: Path, *, create: bool = True) -> None:
        scheme = check_uri(uri)
        os.environ.update({key: value for key, value in SETTINGS.items() if key not in os.environ})
        self.name = tracker_name(uri)
        self._uri = uri
        self._is_database, self._is_sqlite = scheme in DATABASES, scheme == "sqlite"
        self._artifacts = artifacts
        self._experiments: dict[str, str] = {}
        self._roots: dict[str, str] = {}  # run id -> artifact URI
        with self._speaking():
            if self._is_database and is_of_another(uri, _TABLE):
                raise Unreachable(
                    f"{self.name} is another program's database: make one for MLflow, and name it by --tracking-uri."
                )
            if scheme == "sqlite":
                database = path_of(uri) or Path()  # `check_uri` has seen that it names one
                if create:
                    initialise(database, artifacts)
                elif not database.exists():
                    raise Unreachable(f"MLflow's database {database} is gone: `{command('sync')}` makes it anew.")
                elif not writable(database):
                    # With the driver's name, since MLflow makes the directory of what follows a bare `sqlite:///`.
                    uri = read_only(uri, database)
            self._address, self._made = uri, create and self._is_database
            self._connect()

    def _connect(self) -> None:
        self._client  # noqa: B018  # so that a store which cannot be opened is known at once

    @cached_property
    def _client(self) -> MlflowClient:
        return _open(self._address, self._artifacts, made=self._made)

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

    def open_trial(self, parent: str, run: Run) -> str:
        return self._create(self._experiment(run.tags["hpo.study"]), run, {"mlflow.parentRunId": parent})

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        experiment = self._known(study)
        if experiment is None:
            return []
        which = f"tags.`hpo.run_uid` LIKE '{uid}/%'" if children else f"tags.`hpo.run_uid` = '{uid}'"
        found: list[RunView] = []
        token: str | None = None
        with self._speaking():
            while True:
                page = self._client.search_runs(
                    [experiment],
                    which,
                    max_results=_PAGE,
                    order_by=["attributes.start_time ASC"],
                    page_token=token,
                )
                found += [self._view(run) for run in page]
                token = page.token
                if not token:
                    return found

    def send(self, run_id: str, batch: Batch) -> None:
        from mlflow.entities import Metric, Param, RunTag

        with self._speaking():
            self._send_artifacts(run_id, batch)
            if batch.datasets:
                self._client.log_inputs(run_id, [datasets.as_input(one) for one in batch.datasets])
            self._client.log_batch(
                run_id,
                metrics=[Metric(p.key, p.value, p.timestamp, p.step) for p in batch.points],
                params=[Param(key, value) for key, value in batch.params.items()],
                tags=[RunTag(key, value) for key, value in batch.tags.items()],
            )
            self._remove_tags(run_id, batch.removed_tags)
            if batch.models or batch.removed_models:
                experiment = self._client.get_run(run_id).info.experiment_id
                self._models.send(experiment, run_id, batch.models, batch.removed_models)
            if batch.ended_at is not None:
                self._client.set_terminated(run_id, batch.status, batch.ended_at)
            elif batch.status is not None:
                self._client.update_run(run_id, batch.status)

    def _remove_tags(self, run_id: str, keys: Sequence[str]) -> None:
        if keys:  # those that are there: MLflow refuses to take away what is not
            there = self._client.get_run(run_id).data.tags
            for key in (key for key in keys if key in there):
                self._client.delete_tag(run_id, key)

    def discard(self, run_id: str) -> None:
        with self._speaking():
            self._models.discard(self._client.get_run(run_id).info.experiment_id, run_id)
            self._client.delete_run(run_id)

    def remove(self, study: str, uid: str) -> None:
        own = self._artifacts if self._is_database else None
        with self._speaking():
            remove_study(self._client, self._models, directory_of, study, uid, own=own)
        self._experiments.pop(study, None)

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        store = self._client._tracking_client.store
        with self._speaking():
            if self._is_database:  # one query for a metric of many runs; a server would take one for each
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

    def digests(self, run_id: str) -> dict[str, str]:
        with self._speaking():
            root = self._local(run_id)
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
        """MLflow's client commits, and a server answers, once all is on the disk."""

    def registry(self) -> Registry:
        """The registry of models that goes with it."""
        return Registry(self._client, self._models, self._speaking, is_database=self._is_database)

    def close(self) -> None:
        if self._is_database and "_client" in self.__dict__:
            self._client._tracking_client.store._dispose_engine()

    def _create(self, experiment: str, run: Run, tags: dict[str, str]) -> str:
        tags = {"mlflow.user": _user(), "mlflow.source.type": "LOCAL", **run.tags, **tags}
        tags |= {"mlflow.source.name": run.source} if run.source else {}
        tags |= {"mlflow.source.git.commit": run.commit} if run.commit else {}
        with self._speaking():
            run_id, self._roots[run_id] = self._made_run(experiment, run, tags)
            return run_id

    def _made_run(self, experiment: str, run: Run, tags: dict[str, str]) -> tuple[str, str]:
        """A new run, and where its artifacts lie."""
        created = self._client.create_run(experiment, run.started_at, tags, run.name)
        return created.info.run_id, str(created.info.artifact_uri)

    def _experiment(self, study: str) -> str:
        """The study's experiment, made if there is none."""
        if (known := self._known(study)) is not None:
            return known
        with self._speaking():
            place = location(self._artifacts / study) if self._is_database else None
            self._experiments[study] = self._made_experiment(study, place)
        return self._experiments[study]

    def _made_experiment(self, study: str, place: str | None) -> str:
        return self._client.create_experiment(study, place)

    def _known(self, study: str) -> str | None:
        """The study's experiment, if there is one."""
        if study not in self._experiments:
            with self._speaking():
                found = self._experiment_named(study)
            if found is None:
                return None
            self._experiments[study], stage = found
            if stage == "deleted":
                del self._experiments[study]
                raise Unreachable(
                    f"MLflow's experiment {study!r} was deleted: restore it, or give the study another --name."
                )
        return self._experiments[study]

    def _experiment_named(self, study: str) -> tuple[str, str] | None:
        """The id and the lifecycle stage of an experiment."""
        found = self._client.get_experiment_by_name(study)
        return None if found is None else (found.experiment_id, found.lifecycle_stage)

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
            frozenset((one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs),
        )

    def _send_artifacts(self, run_id: str, batch: Batch) -> None:
        if not (batch.texts or batch.files or batch.removed):
            return
        root = self._local(run_id)
        for name in batch.removed:
            self._remove(run_id, name, root)
        for name, text in batch.texts.items():
            if root is not None:
                write_text(root / name, text)
            else:
                self._client.log_text(run_id, text, name)
        for name, source in batch.files.items():
            try:
                self._add(run_id, name, source, root)
            except FileNotFoundError:
                if source.exists():
                    raise
                # Retention records a removal before it removes: the row that says so is next. Leave no half behind.
                self._remove(run_id, name, root)
                print(f"{source} is gone; it is not mirrored.", flush=True)

    def _add(self, run_id: str, name: str, source: Path, root: Path | None) -> None:
        if root is not None:
            link(source, root / name)
        elif source.is_dir():
            self._client.log_artifacts(run_id, str(source), name)
        else:
            with tempfile.TemporaryDirectory() as copy:  # the client keeps the file's own name
                named = Path(copy) / PurePosixPath(name).name
                shutil.copyfile(source, named)
                parent = str(PurePosixPath(name).parent)
                self._client.log_artifact(run_id, str(named), None if parent == "." else parent)

    def _remove(self, run_id: str, name: str, root: Path | None) -> None:
        if root is not None:
            shutil.rmtree(root / name, ignore_errors=not (root / name).exists())
            return
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        if self._client.list_artifacts(run_id, name):
            get_artifact_repository(self._artifact_uri(run_id), self._uri).delete_artifacts(name)

    def _artifact_uri(self, run_id: str) -> str:
        if run_id not in self._roots:
            self._roots[run_id] = str(self._client.get_run(run_id).info.artifact_uri)
        return self._roots[run_id]

    def _local(self, run_id: str) -> Path | None:
        """The run's artifact directory if this host has it, None if artifacts go through a server or a store."""
        root = directory_of(self._artifact_uri(run_id))
        if root is None:
            return None
        if not self._is_database and not loopback(self.name) and not root.parents[1].exists():
            raise Unreachable(
                f"MLflow at {self.name} keeps artifacts in {root.parents[1]} on its own host: start it with "
                "--serve-artifacts, or give both hosts that directory."
            )
        return root

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Turn what MLflow, the network and the disk raise into Unreachable or Refused, in one sentence."""
        try:
            yield
        except FileNotFoundError as error:
            raise Refused(f"{error.filename} is missing.") from error
        except Exception as error:
            if isinstance(error, HpoError) or not isinstance(error, _outages()):
                raise
            text = redacted(" ".join(str(error).split()))[:300]
            if self._is_sqlite and (damaged := of_error(self._uri, text)):
                raise Unreachable(damaged) from error
            if getattr(error, "error_code", None) in _REFUSALS:
                raise Refused(f"MLflow at {self.name} refuses this: {text}") from error
            raise Unreachable(_away(self._uri) or f"MLflow at {self.name} cannot be used now: {text}") from error


def _open(uri: str, artifacts: Path, *, made: bool) -> MlflowClient:
    from mlflow import MlflowClient

    if not made:
        return MlflowClient(uri)
    with locked(artifacts.parent / "mlflow.lock"):  # the first to open another database makes its tables
        return MlflowClient(uri)


def _outages() -> tuple[type[Exception], ...]:
    """What MLflow, its database, the network and the disk raise."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    return (MlflowException, RequestException, *DATABASE_ERRORS, OSError)


def _user() -> str:
    """The user's name, or the uid where it has none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return str(os.getuid())
