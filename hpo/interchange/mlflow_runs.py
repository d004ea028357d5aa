"""Reads the runs of an MLflow experiment: from a server, a database or a directory of runs.

MLflow brings an older database to its own release as it opens it, so one of SQLite is read from a copy.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.interchange.texts import read_columns
from hpo.ledger.sqlite_url import path_of, url_of
from hpo.ledger.store import DATABASE_ERRORS
from hpo.text import counted, near
from hpo.tracking.mlflow import SETTINGS
from hpo.tracking.uri import check_uri
from trainer.redaction import redacted, redacted_url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# MLflow knows no trial that was stopped on purpose: a run that was killed is the nearest to one.
_STATES: dict[str, State] = {"FINISHED": "complete", "KILLED": "pruned", "FAILED": "failed"}
_PAGE = 1000


def read(
    uri: str, experiment: str | None, metrics: Sequence[str] = (), directions: Sequence[str] = ()
) -> ImportedStudy:
    """The runs of the experiment of that name, or of the only one that has any. Raises UserError."""
    shown = redacted_url(uri)
    with _opened(uri, shown) as client:
        name, runs = _chosen(client, experiment, shown)
        parents = {run.data.tags.get("mlflow.parentRunId") for run in runs}
        ours = [run for run in runs if run.info.run_id not in parents]
        ended = [run for run in ours if run.info.status in _STATES]
        open_ = Counter(run.info.status for run in ours if run.info.status not in _STATES)
        known = {metric for run in ended for metric in run.data.metrics}
        objectives = judged_by(metrics, directions, known, f"experiment {name!r} of {shown}")
        params = read_columns([run.data.params for run in ended])
        judged, doubled = [one.metric for one in objectives], Counter[str]()
        trials = [_trial(client, run, params[at], judged, doubled) for at, run in enumerate(ended)]
    left = [f"{counted(count, 'run')} in state {state}, which may end yet" for state, count in open_.items()]
    left += [f"{counted(len(runs) - len(ours), 'run')} that others are nested in"] if len(ours) < len(runs) else []
    left += [f"{counted(n, 'value')} of {metric} at steps that have a later one" for metric, n in doubled.items()]
    left += ["artifacts and models, which stay where they are"]
    return ImportedStudy("mlflow", name, shown, tuple(objectives), trials, {}, left)


@contextmanager
def _opened(uri: str, shown: str) -> Iterator[MlflowClient]:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    before = dict(os.environ)
    os.environ.update({key: value for key, value in SETTINGS.items() if key not in os.environ})
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # it is only read
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield MlflowClient(_readable(uri, shown, Path(scratch)))
    except (MlflowException, RequestException, *DATABASE_ERRORS, OSError) as error:
        said = redacted(" ".join(str(error).split()))[:200].rstrip(".")
        raise UserError(
            f"{shown} cannot be read as a store of MLflow's ({said}): name another, or restore it."
        ) from error
    finally:
        os.environ.clear()
        os.environ.update(before)


def _readable(uri: str, shown: str, scratch: Path) -> str:
    """The URI to be opened: of a database of SQLite that of a copy in `scratch`."""
    if "://" not in uri and not uri.startswith("sqlite"):
        root = Path(uri).expanduser()
        if root.is_file():
            uri = url_of(root.absolute())
        elif root.is_dir() and any(root.glob("*/meta.yaml")):
            return str(root.absolute())
        else:
            raise UserError(f"{shown} is no directory of MLflow's runs, such as mlruns, and no database: name another.")
    if check_uri(uri) != "sqlite":
        return uri
    path = path_of(uri)
    if path is None or not path.is_file():
        raise UserError(f"{shown}: there is no file {path}: name MLflow's database.")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
        if not source.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
            raise UserError(f"{path} is a database, but not one of MLflow's: name another.")
        with closing(sqlite3.connect(scratch / "mlflow.db")) as copy:
            source.backup(copy)
    return url_of(scratch / "mlflow.db")


def _chosen(client: MlflowClient, name: str | None, shown: str) -> tuple[str, list[Run]]:
    """The experiment's name and its runs, in the order in which they began."""
    experiments = {one.name: one.experiment_id for one in client.search_experiments()}
    if name is not None and name not in experiments:
        there, hint = ", ".join(sorted(experiments)) or "none", near(name, experiments) or ": name one by --experiment."
        raise UserError(f"{shown} has no experiment {name!r} (it has {there}){hint}")
    wanted = {name: experiments[name]} if name is not None else experiments
    runs = {one: _runs(client, key) for one, key in wanted.items()}
    filled = [one for one, found in runs.items() if found]
    if len(filled) != 1:
        there = f"runs in {', '.join(sorted(filled))}" if filled else "no runs"
        raise UserError(f"{shown} has {there}: name the experiment by --experiment.")
    return filled[0], runs[filled[0]]


def _runs(client: MlflowClient, experiment: str) -> list[Run]:
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment], max_results=_PAGE, page_token=token)
        found += page
        if not (token := page.token):
            return sorted(found, key=lambda run: (run.info.start_time or 0, run.info.run_id))


def _trial(
    client: MlflowClient, run: Run, params: Mapping[str, Any], judged: Sequence[str], doubled: Counter[str]
) -> ImportedTrial:
    curves = {metric: _curve(client, run.info.run_id, metric, doubled) for metric in run.data.metrics}
    values = [run.data.metrics[metric] for metric in judged if metric in run.data.metrics]
    state = _STATES[run.info.status]
    missing = [metric for metric in judged if metric not in run.data.metrics]
    if state == "complete" and missing:
        state = "failed"
    notes = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
    return ImportedTrial(
        key=run.info.run_id,
        state=state,
        params=params,
        values=values if not missing and state != "failed" else None,
        curves=curves,
        started=None if run.info.start_time is None else run.info.start_time / 1000,
        ended=None if run.info.end_time is None else run.info.end_time / 1000,
        error=f"it never reported {' and '.join(missing)}" if missing and state == "failed" else "",
        attributes={"run name": run.info.run_name, **notes},
    )


def _curve(client: MlflowClient, run_id: str, metric: str, doubled: Counter[str]) -> list[Point]:
    """The points by step; where all have one step, since none was given, by time from step 0."""
    history = sorted(client.get_metric_history(run_id, metric), key=lambda one: (one.step, one.timestamp))
    if len({one.step for one in history}) == 1 and len(history) > 1:
        return [Point(step, one.value, one.timestamp / 1000) for step, one in enumerate(history)]
    by_step = {one.step: Point(one.step, one.value, one.timestamp / 1000) for one in history}
    if len(by_step) < len(history):
        doubled[metric] += len(history) - len(by_step)
    return list(by_step.values())
