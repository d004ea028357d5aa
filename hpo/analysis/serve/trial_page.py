"""Reads the content of a trial's page: its record in the ledger, its curves by epoch, step and time, and its logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from hpo.analysis.report.curves import rounded, thin
from hpo.analysis.results.compare import headline
from hpo.analysis.results.trial import detail
from hpo.ledger import queries
from hpo.ledger.names import machine_dependent
from hpo.ledger.views import live as live_queries
from hpo.space.config import flatten
from hpo.space.objective import hold_out_of
from hpo.storage import artifacts
from hpo.tracking.uri import DATABASES

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home

TAIL = 32 * 1024  # bytes of a log that are shown
MOST_LOGS = 4
_BEYOND = 2**31 - 1  # a number above those of all trials
_TEXTS = (".log", ".txt", ".out", ".err")


def trial_page(
    connection: Connection, home: Home, name: str, number: int, mlflow: str, shares: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the trial as the template needs it. Raises StudyError or UserError if there is none.

    `mlflow` is the address of MLflow's pages of the home, empty if unknown. `shares` are the importances by which the
    parameters are ordered, if the study's report is known.
    """
    record = detail(connection, home, name, number)
    study = queries.study_row(connection, name)
    objectives = study.spec.objectives
    spans = [(attempt["started_at"], attempt["ended_at"]) for attempt in record["attempts"]]
    metrics = [objective["metric"] for objective in objectives]
    drawn = curves(connection, study.id, number, metrics)
    paths, ranks = (
        sorted(record["params"], key=lambda path: -(shares or {}).get(path, -1.0)),
        queries.ranks(connection, study),
    )
    reasons = [entry["reason"] for entry in record["decisions"] if entry["verdict"] in ("stop", "pause")]
    return {
        **record,
        "params": {path: record["params"][path] for path in paths},
        "place": ranks[number][1] + 1 if number in ranks and len(objectives) == 1 else None,
        "placed": len(ranks),
        "why": reasons[-1] if reasons and record["state"] in ("pruned", "paused") else "",
        "neighbours": [
            row.number for row in live_queries.moved(connection, study.id, _BEYOND, [number - 1, number + 1])
        ],
        "hold_outs": [key for metric in record["values"] if (key := hold_out_of(metric)) in drawn],
        "usual": [key for key in drawn if key in metrics or key.partition("/")[0] in ("val", "test")],
        "machine": [key for key in drawn if machine_dependent(key)],
        "objectives": objectives,
        "settings": flatten(record["config"]),
        "curves": drawn,
        "by_epoch": by_epoch(drawn, metrics),
        "runs": [
            {"tracker": tracker, "run": run, "link": run_link(tracker, run, mlflow)}
            for tracker, run in live_queries.runs(connection, study.id, number).items()
        ],
        "logs": [{"name": file.name, "text": tail(file)} for file in logs(connection, home, name, record, spans)],
    }


def curves(connection: Connection, study_id: int, number: int, metrics: Sequence[str]) -> dict[str, Any]:
    """Returns metric -> {"step", "epoch", "time", "value"}: [[number]], the most important metrics first.

    `epoch` and its values are of the reports that closed an epoch; `time` is in seconds since the trial began.
    """
    read: dict[str, list[live_queries.Point]] = {}
    for point in live_queries.points(connection, study_id, [number]):
        read.setdefault(point.key, []).append(point)
    by_metric: dict[str, Any] = {}
    for key in headline(list(read), metrics, every=True):
        over = {
            "epoch": [(point.epoch, point.value) for point in read[key] if point.epoch is not None],
            "step": [(point.step, point.value) for point in read[key]],
            "time": [(round(point.seconds, 2), point.value) for point in read[key]],
        }
        by_metric[key] = {
            axis: [[x for x, _ in shown], [rounded(y) for _, y in shown]]
            for axis, points in over.items()
            if (shown := thin(points, 1000))
        }
    return by_metric


def by_epoch(
    drawn: Mapping[str, Mapping[str, Sequence[Sequence[float | None]]]], metrics: Sequence[str]
) -> dict[str, object]:
    """Returns {"metrics": [name], "rows": [(epoch, [value or None])]} of the objectives and their held-out metrics.

    A long curve has as many rows as its plot has points.
    """
    shown = [key for metric in metrics for key in (metric, hold_out_of(metric)) if key and key in drawn]
    columns = [dict(zip(*drawn[key].get("epoch", ([], [])), strict=True)) for key in shown]
    epochs = sorted({epoch for column in columns for epoch in column})
    return {"metrics": shown, "rows": [(epoch, [column.get(epoch) for column in columns]) for epoch in epochs]}


def run_link(tracker: str, run: str, mlflow: str) -> str:
    """Returns the address of a trial's run on the tracking server, or in the home's MLflow pages; else empty."""
    scheme = urlsplit(tracker).scheme.partition("+")[0]
    base = tracker if scheme in ("http", "https") else mlflow if scheme in DATABASES else ""
    return f"{base.rstrip('/')}/#/runs/{quote(run, safe='')}" if base else ""


# Logs


def logs(
    connection: Connection,
    home: Home,
    name: str,
    trial: Mapping[str, Any],
    spans: Sequence[tuple[float, float | None]],
) -> list[Path]:
    """Returns logs of the trial's program, and of workers while it was trained. Only this module makes their paths."""
    number, study_id = trial["number"], queries.study_row(connection, name).id
    [trial_id] = [row.id for row in queries.trial_rows(connection, study_id, [number])]
    kept = artifacts.artifacts(connection, trial_id)
    files = [home.files(name, number) / path for shown, path in kept.items() if shown.endswith(_TEXTS)]
    running = home.output(name) / home.files(name, number).name
    files += sorted(running.glob("*.log")) if running.is_dir() else []
    below = home.root.resolve()
    return [file for file in (*files, *_workers(home, name, spans)) if _inside(file, below)][:MOST_LOGS]


def _workers(home: Home, name: str, spans: Sequence[tuple[float, float | None]]) -> Iterator[Path]:
    """Yields the logs of workers that were written while the trial was trained, the newest first."""
    files = sorted(home.logs.glob(f"{name}.*.worker-*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        begun = file.name.removeprefix(f"{name}.").partition("-")[0]
        try:
            begin = datetime.strptime(begun, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
        except ValueError:  # a log of another study, whose name begins with this one's
            continue
        end = file.stat().st_mtime
        if any(begin <= (last or end) and start <= end for start, last in spans):
            yield file


def _inside(file: Path, below: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.resolve().is_relative_to(below) and file.stat().st_size > 0


def tail(file: Path) -> str:
    """Returns the end of a file from the start of a line, with a note if something is left out."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - TAIL))
        text = opened.read(TAIL).decode(errors="replace")
    return f"... {size - TAIL} bytes before are left out\n{text.partition(chr(10))[2]}" if size > TAIL else text
