"""A study as offline runs of Weights & Biases: one for each trial that has ended, which `wandb sync` uploads.

Points wait in `points.jsonl` until a trial has ended; then W&B's own library writes the run, under an id that the trial
has for ever, into a directory that gets its name once it is whole. Nothing is sent anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hpo.tracking.base import Point, Unreachable
from hpo.tracking.run_folders import FolderTracker
from trainer.files.durable import sync

POINTS = "points.jsonl"
RUNS = "offline-runs"  # below the folder of a study
_EXIT = {"FINISHED": 0}  # of a run; any other is a failure
_RESERVED = ("_step", "_timestamp", "_runtime", "_wandb")  # names that W&B gives a meaning of its own


class WandbTracker(FolderTracker):
    """`wandb sync DIR/*/offline-runs/*` uploads it."""

    def __init__(self, root: Path) -> None:
        super().__init__("wandb", root)

    def _read(self, folder: Path) -> list[Point]:
        file = folder / POINTS
        data = file.read_bytes() if file.exists() else b""
        return [Point(*json.loads(line)) for line in data[: data.rfind(b"\n") + 1].splitlines()]

    def _append(self, folder: Path, points: Sequence[Point]) -> None:
        file = folder / POINTS
        with file.open("r+b" if file.exists() else "w+b") as stream:
            end = stream.read().rfind(b"\n") + 1  # a line without one was cut off
            stream.truncate(end)
            stream.seek(end)
            stream.write("".join(f"{json.dumps(point)}\n" for point in points).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def discard(self, run_id: str) -> None:
        if folder := self._known().get(run_id):
            with self._reaching():
                shutil.rmtree(place := _place(folder, run_id), ignore_errors=not place.exists())
        super().discard(run_id)

    def _show(self, folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Write the run of a trial that has ended, anew where something has changed since."""
        place = _place(folder, now["uid"])
        if now["ended_at"] is None or not now["params"] or (now == before and place.exists()):
            return
        place.parent.mkdir(exist_ok=True)
        for left in place.parent.glob(".*.tmp"):  # of one that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=place.parent) as scratch:
            written = _written(Path(scratch), folder.parent.name, now, self._read(folder))
            for path in [*written.rglob("*"), written]:
                sync(path)
            shutil.rmtree(place, ignore_errors=not place.exists())
            written.rename(place)
            sync(place.parent)


def run_id(uid: str) -> str:
    """The id of a trial's run in W&B, the same however often it is written."""
    return hashlib.sha256(uid.encode()).hexdigest()[:16]


def _place(folder: Path, uid: str) -> Path:
    """Where the offline run of a trial lies, beside its folder."""
    return folder.parent / RUNS / f"offline-run-{run_id(uid)}"


def _written(scratch: Path, group: str, record: Mapping[str, Any], points: Sequence[Point]) -> Path:
    """The directory of an offline run that W&B's library has written."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would send its own errors home
    import wandb

    settings = wandb.Settings(
        mode="offline", silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
        x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
    )  # fmt: skip
    try:
        run = wandb.init(
            project=record["study"],
            group=group,
            name=record["name"],
            id=run_id(record["uid"]),
            dir=scratch,
            config={_name(path): _value(text) for path, text in record["params"].items()},
            tags=[record["tags"].get("hpo.state") or record["status"].lower()],
            notes=record["tags"].get("hpo.error"),
            settings=settings,
        )
    except wandb.Error as error:
        raise Unreachable(f"W&B writes no run ({error})") from error
    for step, at_step in groupby(sorted(points, key=lambda point: point.step), key=lambda point: point.step):
        found = list(at_step)
        values = {_name(point.key): point.value for point in found}
        run.log(values | {"_timestamp": max(point.timestamp for point in found) / 1000}, step=step)
    run.finish(exit_code=_EXIT.get(record["status"], 1))
    [written] = scratch.glob("wandb/offline-run-*")
    return written


def _name(name: str) -> str:
    """Returns the name that a metric or parameter has in W&B: its own, or below `hpo/` where W&B reserves it."""
    return f"hpo/{name}" if name in _RESERVED else name


def _value(text: str) -> Any:
    """A parameter as the number that it is, else as its text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
