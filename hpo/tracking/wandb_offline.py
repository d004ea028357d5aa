"""Writes a study as offline runs of Weights & Biases: one for each ended trial, for `wandb sync` to upload.

Points wait in `points.jsonl` until a trial has ended. Then W&B's own library writes the run, under the trial's
permanent id, into a directory that gets its name once it is whole. Nothing is sent anywhere.
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
_EXIT = {"FINISHED": 0}  # of a run; any other status is a failure
_RESERVED = ("_step", "_timestamp", "_runtime", "_wandb")  # names that W&B reserves


class WandbTracker(FolderTracker):
    """Writes runs that `wandb sync DIR/*/offline-runs/*` uploads."""

    def read(self, folder: Path) -> list[Point]:
        file = folder / POINTS
        data = file.read_bytes() if file.exists() else b""
        return [Point(*json.loads(line)) for line in data[: data.rfind(b"\n") + 1].splitlines()]

    def append(self, folder: Path, points: Sequence[Point]) -> None:
        file = folder / POINTS
        with file.open("r+b" if file.exists() else "w+b") as stream:
            end = stream.read().rfind(b"\n") + 1  # a line without a newline was cut off
            stream.truncate(end)
            stream.seek(end)
            stream.write("".join(f"{json.dumps(point)}\n" for point in points).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def discard(self, run_id: str) -> None:
        if folder := self._known().get(run_id):
            with self._reaching():
                shutil.rmtree(run_folder := _run_folder(folder, run_id), ignore_errors=not run_folder.exists())
        super().discard(run_id)

    def show(self, folder: Path, before: Mapping[str, object], now: Mapping[str, Any]) -> None:
        """Writes the run of an ended trial, again if something has changed since."""
        run_folder = _run_folder(folder, now["uid"])
        if now["ended_at"] is None or not now["params"] or (now == before and run_folder.exists()):
            return
        run_folder.parent.mkdir(exist_ok=True)
        for left in run_folder.parent.glob(".*.tmp"):  # of a killed process
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=run_folder.parent) as scratch:
            written = _written(Path(scratch), folder.parent.name, now, self.read(folder))
            for path in [*written.rglob("*"), written]:
                sync(path)
            shutil.rmtree(run_folder, ignore_errors=not run_folder.exists())
            written.rename(run_folder)
            sync(run_folder.parent)


def run_id(uid: str) -> str:
    """Returns the permanent id of a trial's run in W&B."""
    return hashlib.sha256(uid.encode()).hexdigest()[:16]


def _run_folder(folder: Path, uid: str) -> Path:
    """Returns the directory of a trial's offline run, beside its folder."""
    return folder.parent / RUNS / f"offline-run-{run_id(uid)}"


def _written(scratch: Path, group: str, record: Mapping[str, Any], points: Sequence[Point]) -> Path:
    """Returns the directory of an offline run that W&B's library has written."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B would report its own errors online
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
        step_points = list(at_step)
        values = {_name(point.key): point.value for point in step_points}
        run.log(values | {"_timestamp": max(point.timestamp for point in step_points) / 1000}, step=step)
    run.finish(exit_code=_EXIT.get(record["status"], 1))
    [written] = scratch.glob("wandb/offline-run-*")
    return written


def _name(name: str) -> str:
    """Returns the name of a metric or parameter in W&B, put below `hpo/` if W&B reserves it."""
    return f"hpo/{name}" if name in _RESERVED else name


def _value(text: str) -> Any:
    """Returns a parameter as a number if it is one, else as its text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
