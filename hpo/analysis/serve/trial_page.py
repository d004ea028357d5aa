"""What the page of a trial shows: all that the ledger has of it, its curves by epoch and time, and its logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from hpo.analysis.report.curves import rounded, thin
from hpo.analysis.results.compare import headline
from hpo.analysis.results.trial import detail
from hpo.ledger import live_queries, queries
from hpo.space.config import flatten
from hpo.storage import artifacts
from hpo.tracking.uri import DATABASES

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home

TAIL = 32 * 1024  # bytes of a log that are shown
MOST_LOGS = 4
_TEXTS = (".log", ".txt", ".out", ".err")


def trial_page(connection: Connection, home: Home, name: str, number: int, mlflow: str) -> dict[str, Any]:
    """The trial as the template takes it. Raises StudyError or UserError where there is none.

    `mlflow` is where MLflow's pages of the home are, where somebody has said so.
    """
    found = detail(connection, home, name, number)
    study = queries.study_row(connection, name)
    objectives = study["spec"]["objectives"]
    spans = [(one["started_at"], one["ended_at"]) for one in found["attempts"]]
    return {
        **found,
        "objectives": objectives,
        "settings": flatten(found["config"]),
        "curves": curves(connection, study["id"], number, [one["metric"] for one in objectives]),
        "runs": [
            {"tracker": tracker, "run": run, "link": run_link(tracker, run, mlflow)}
            for tracker, run in live_queries.runs(connection, study["id"], number).items()
        ],
        "logs": [{"name": file.name, "text": tail(file)} for file in logs(connection, home, name, found, spans)],
    }


def curves(connection: Connection, study_id: int, number: int, metrics: Sequence[str]) -> dict[str, Any]:
    """Metric -> {"step", "epoch", "time", "value"}: [[number]], the metrics that matter most first.

    `epoch` and its values are of the reports that have closed one; `time` is in seconds since the trial began.
    """
    read: dict[str, list[live_queries.Point]] = {}
    for point in live_queries.points(connection, study_id, [number]):
        read.setdefault(point.key, []).append(point)
    found: dict[str, Any] = {}
    for key in headline(list(read), metrics, every=True):
        over = {
            "epoch": [(one.epoch, one.value) for one in read[key] if one.epoch is not None],
            "step": [(one.step, one.value) for one in read[key]],
            "time": [(round(one.seconds, 2), one.value) for one in read[key]],
        }
        found[key] = {
            axis: [[x for x, _ in shown], [rounded(y) for _, y in shown]]
            for axis, points in over.items()
            if (shown := thin(points, 1000))
        }
    return found


def run_link(tracker: str, run: str, mlflow: str) -> str:
    """The page of a trial's run in MLflow: on the tracking server, or where the pages of the home are; else empty."""
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
    """What the trial's program has printed, and what workers have while it was trained; paths are made here alone."""
    number, study_id = trial["number"], queries.study_row(connection, name)["id"]
    [trial_id] = [row["id"] for row in queries.trial_rows(connection, study_id, [number])]
    kept = artifacts.artifacts(connection, trial_id)
    own = [home.files(name, number) / where for shown, where in kept.items() if shown.endswith(_TEXTS)]
    running = home.output(name) / home.files(name, number).name
    own += sorted(running.glob("*.log")) if running.is_dir() else []
    below = home.root.resolve()
    return [file for file in (*own, *_workers(home, name, spans)) if _inside(file, below)][:MOST_LOGS]


def _workers(home: Home, name: str, spans: Sequence[tuple[float, float | None]]) -> Iterator[Path]:
    """The logs of workers that were written while the trial was trained, the newest first."""
    files = sorted(home.logs.glob(f"{name}.*.worker-*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        begun = file.name.removeprefix(f"{name}.").partition("-")[0]
        try:
            begin = datetime.strptime(begun, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
        except ValueError:  # of a study whose name begins with this one
            continue
        end = file.stat().st_mtime
        if any(begin <= (last or end) and start <= end for start, last in spans):
            yield file


def _inside(file: Path, below: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.resolve().is_relative_to(below) and file.stat().st_size > 0


def tail(file: Path) -> str:
    """The end of a file, from a line's begin on; it says where something is left out."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - TAIL))
        text = opened.read(TAIL).decode(errors="replace")
    return f"... {size - TAIL} bytes before are left out\n{text.partition(chr(10))[2]}" if size > TAIL else text
