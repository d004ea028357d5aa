"""Reads the runs of an MLflow experiment from a server, a database or a directory of runs.

MLflow upgrades an older database when it opens it, so an SQLite database is read from a copy.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.door import option
from hpo.errors import HpoError, UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.interchange.texts import as_number, read_columns
from hpo.ledger.database.sqlite_url import path_of, url_of
from hpo.text import counted, near
from hpo.tracking.mlflow.client import set_up
from hpo.tracking.uri import check_uri
from trainer.redaction import redacted, redacted_url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# MLflow has no state for a trial that was stopped on purpose; a killed run is the nearest.
_STATES: dict[str, State] = {"FINISHED": "complete", "KILLED": "pruned", "FAILED": "failed"}
_PAGE = 1000


def read(
    uri: str, experiment: str | None, metrics: Sequence[str] = (), directions: Sequence[str] = ()
) -> ImportedStudy:
    """Returns the runs of the experiment of that name, or of the only one that has runs. Raises UserError."""
    shown = redacted_url(uri)
    with _opened(uri, shown) as (client, malformed):
        name, runs = _chosen(client, experiment, shown)
        parents = {run.data.tags.get("mlflow.parentRunId") for run in runs}
        ours = [run for run in runs if run.info.run_id not in parents]
        ended_runs = [run for run in ours if run.info.status in _STATES]
        open_ = Counter(run.info.status for run in ours if run.info.status not in _STATES)
        known = {metric for run in ended_runs for metric in run.data.metrics}
        objectives = judged_by(metrics, directions, known, f"experiment {name!r} of {shown}")
        params = read_columns([run.data.params for run in ended_runs])
        judged, doubled = [objective.metric for objective in objectives], Counter[str]()
        trials = [_trial(client, run, params[index], judged, doubled) for index, run in enumerate(ended_runs)]
    left = [f"{counted(count, 'run')} in state {state}, which may end yet" for state, count in open_.items()]
    left += [f"{counted(len(runs) - len(ours), 'run')} that others are nested in"] if len(ours) < len(runs) else []
    left += [f"{counted(n, 'value')} of {metric} at steps that have a later one" for metric, n in doubled.items()]
    left += [f"what MLflow leaves out: {message}" for message in dict.fromkeys(malformed)]
    left += ["artifacts and models, which stay where they are"]
    return ImportedStudy("mlflow", name, shown, tuple(objectives), trials, {}, left)


@contextmanager
def _opened(uri: str, shown: str) -> Iterator[tuple[MlflowClient, list[str]]]:
    """Yields the store's client and MLflow's messages about runs that it skips.

    A store that another version or program has written may make MLflow raise any error: it becomes a UserError.
    """
    from mlflow import MlflowClient

    before = dict(os.environ)
    set_up()
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # the store is only read
    try:
        with tempfile.TemporaryDirectory() as scratch, _malformed() as malformed:
            yield MlflowClient(_readable(uri, shown, Path(scratch))), malformed
    except HpoError:
        raise
    except Exception as error:
        reason = redacted(" ".join(f"{type(error).__name__}: {error}".split()))
        reason = f"{reason[:120]} ... {reason[-120:]}" if len(reason) > 260 else reason.rstrip(".")
        raise UserError(
            f"{shown} cannot be read as a store of MLflow's ({reason}): name another, or restore it."
        ) from error
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _malformed() -> Iterator[list[str]]:
    """Collects the warnings of MLflow's file store, a line each, instead of tracebacks on standard error."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(" ".join(record.getMessage().split())[:200].rstrip("."))
        return False

    loggers = [logging.getLogger(name) for name in (None, "mlflow.store.tracking.file_store")]  # it warns in both
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield messages
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _readable(uri: str, shown: str, scratch: Path) -> str:
    """Returns the URI to open; for an SQLite database that of a copy in `scratch`."""
    if "://" not in uri and not uri.startswith("sqlite"):
        root = Path(uri).expanduser()
        if root.is_file():
            uri = url_of(root.absolute())
        elif root.is_dir() and any(root.glob("*/meta.yaml")):
            return str(root.absolute())
        else:
            raise UserError(
                f"{shown} is not a directory of MLflow runs, such as mlruns, and no database: name another."
            )
    if check_uri(uri) != "sqlite":
        return uri
    path = path_of(uri)
    if path is None or not path.is_file():
        raise UserError(f"{shown}: file {path} does not exist: name MLflow's database.")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
        if not source.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
            raise UserError(f"{path} is a database, but not one of MLflow's: name another.")
        with closing(sqlite3.connect(scratch / "mlflow.db")) as copy:
            source.backup(copy)
    return url_of(scratch / "mlflow.db")


def _chosen(client: MlflowClient, name: str | None, shown: str) -> tuple[str, list[Run]]:
    """Returns the experiment's name and its runs, oldest first."""
    experiments = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
    if name is not None and name not in experiments:
        contents, hint = (
            ", ".join(sorted(experiments)) or "none",
            near(name, experiments) or f": name one by {option('experiment')}.",
        )
        raise UserError(f"{shown} has no experiment {name!r} (it has {contents}){hint}")
    wanted = {name: experiments[name]} if name is not None else experiments
    runs = {title: _runs(client, key) for title, key in wanted.items()}
    filled = [title for title, listed in runs.items() if listed]
    if len(filled) != 1:
        contents = f"runs in {', '.join(sorted(filled))}" if filled else "no runs"
        raise UserError(f"{shown} has {contents}: name the experiment by {option('experiment')}.")
    return filled[0], runs[filled[0]]


def _runs(client: MlflowClient, experiment: str) -> list[Run]:
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment], max_results=_PAGE, page_token=token)
        runs += page
        if not (token := page.token):
            return sorted(runs, key=lambda run: (run.info.start_time or 0, run.info.run_id))


def _trial(
    client: MlflowClient, run: Run, params: Mapping[str, object], judged: Sequence[str], doubled: Counter[str]
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
        started=_seconds(run.info.start_time),
        ended=_seconds(run.info.end_time),
        error=f"it never reported {' and '.join(missing)}" if missing and state == "failed" else "",
        attributes={"run name": run.info.run_name, **notes},
    )


def _seconds(milliseconds: object) -> float | None:
    number = as_number(milliseconds)
    return None if number is None else number / 1000


def _curve(client: MlflowClient, run_id: str, metric: str, doubled: Counter[str]) -> list[Point]:
    """Returns the points by step. If all share one step, because none was logged, time orders them from step 0."""
    history = sorted(client.get_metric_history(run_id, metric), key=lambda point: (point.step, point.timestamp))
    if len({point.step for point in history}) == 1 and len(history) > 1:
        return [Point(step, point.value, point.timestamp / 1000) for step, point in enumerate(history)]
    by_step = {point.step: Point(point.step, point.value, point.timestamp / 1000) for point in history}
    if len(by_step) < len(history):
        doubled[metric] += len(history) - len(by_step)
    return list(by_step.values())
