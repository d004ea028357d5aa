"""Reads runs of Weights & Biases: the files run-ID.wandb that runs leave in wandb/, or the table that its pages export.

A .wandb file is a log of records in blocks of 32 KiB, in the format of LevelDB's log with a checksum of zlib's, after a
header of seven bytes. wandb has no reader of it in Python any more; its messages say what is in a record.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.errors import UserError
from hpo.interchange import table
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.interchange.texts import flat
from hpo.text import counted, near

_HEADER, _BLOCK, _FRAME = b":W&B\xe1\xbe", 32 * 1024, struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _LAST = 1, 2, 4
_ODD = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass
class _Run:
    """A run as its records tell it."""

    id: str
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, dict[int, Point]] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None  # None while it has not ended


def read(
    path: str,
    project: str | None,
    metrics: Sequence[str] = (),
    directions: Sequence[str] = (),
    *,
    params: Sequence[str] = (),
) -> ImportedStudy:
    """The runs of that project, or of the only one, below a directory; or the rows of a CSV file. Raises UserError."""
    place = Path(path).expanduser()
    if place.is_file() and place.suffix != ".wandb":
        return table.read(path, project, metrics, directions, params=params, tool="wandb")
    if params:
        raise UserError(f"--param {params[0]}: the runs of {path} say what is configured: leave the option out.")
    found = [place] if place.is_file() else sorted(place.rglob("*.wandb"))
    if not found:
        raise UserError(
            f"{path} holds no run-ID.wandb: name the directory wandb of your runs, or an exported CSV file."
        )
    runs = _runs(found)
    name = _chosen(sorted({run.project for run in runs}), project, path)
    own = [run for run in runs if run.project == name]
    ended = [run for run in own if run.exit_code is not None]
    objectives = judged_by(metrics, directions, {metric for run in ended for metric in run.curves}, path)
    trials = [_trial(run, [one.metric for one in objectives]) for run in ended]
    left = (
        [f"{counted(len(own) - len(ended), 'run')} without an end, which may run still"]
        if len(own) > len(ended)
        else []
    )
    left += ["media, artifacts and system metrics, which stay where they are"]
    return ImportedStudy("wandb", name, path, tuple(objectives), trials, {}, left)


def _runs(files: Sequence[Path]) -> list[_Run]:
    """The runs in the order in which they began; the files of one that was resumed are one run."""
    runs: dict[str, _Run] = {}
    for file in files:
        current: _Run | None = None
        for record in _records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                current = runs.setdefault(record.run.run_id, _Run(record.run.run_id))
                _begin(current, record.run)
            elif current is not None:
                _follow(current, kind, record, file)
    return sorted(runs.values(), key=lambda run: (run.started or 0.0, run.id))


def _chosen(projects: Sequence[str], given: str | None, path: str) -> str:
    if given is not None and given not in projects:
        hint = near(given, projects) or ": name one by --project."
        raise UserError(f"{path} has no project {given!r} (it has {', '.join(projects) or 'none'}){hint}")
    if given is None and len(projects) != 1:
        raise UserError(f"{path} has runs of {', '.join(projects) or 'no project'}: name one by --project.")
    return given or projects[0]


def _begin(run: _Run, record: Any) -> None:
    run.project = record.project or "uncategorized"
    _configure(run, record.config)
    texts = {
        "run name": record.display_name,
        "group": record.run_group,
        "sweep": record.sweep_id,
        "notes": record.notes,
    }
    run.notes |= {name: text for name, text in texts.items() if text} | (
        {"tags": [*record.tags]} if record.tags else {}
    )
    if run.started is None:
        run.started = record.start_time.seconds + record.start_time.nanos / 1e9
    run.exit_code = None


def _configure(run: _Run, record: Any) -> None:
    for one in record.update:
        name = ".".join(one.nested_key) or one.key
        if name.partition(".")[0] != "_wandb":
            run.config |= flat({name: json.loads(one.value_json)}, ".")


def _follow(run: _Run, kind: str, record: Any, file: Path) -> None:
    try:
        if kind == "config":
            _configure(run, record.config)
        elif kind == "history":
            _report(run, record.history)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    except ValueError as error:
        raise UserError(f"{file}, record {record.num}, is damaged ({error}): restore it from a backup.") from error


def _report(run: _Run, history: Any) -> None:
    items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
    step = int(items.get("_step", history.step.num))
    at = items.get("_timestamp")
    run.ended = at if at is not None else run.ended
    for metric, value in flat(items, ".").items():
        number = _ODD.get(value) if isinstance(value, str) else value
        if metric[:1] != "_" and isinstance(number, int | float) and not isinstance(number, bool):
            run.curves.setdefault(metric, {})[step] = Point(step, float(number), at)


def _trial(run: _Run, judged: Sequence[str]) -> ImportedTrial:
    missing = [metric for metric in judged if metric not in run.curves]
    state: State = "failed" if run.exit_code or missing else "complete"
    error = f"it ended with exit code {run.exit_code}" if run.exit_code else ""
    error = error or (f"it never reported {' and '.join(missing)}" if missing else "")
    curves = {metric: [points[step] for step in sorted(points)] for metric, points in run.curves.items()}
    values = [curves[metric][-1].value for metric in judged] if state == "complete" else None
    return ImportedTrial(
        run.id, state, run.config, values, {}, curves, {}, run.started, run.ended, error, attributes=run.notes
    )


def _records(file: Path) -> Iterator[Any]:
    """The messages of a file. Raises UserError where it is damaged, or wandb is missing."""
    try:
        from wandb.proto import wandb_internal_pb2 as messages
    except ModuleNotFoundError as error:
        raise UserError(f"{file} needs wandb to be read: pip install 'hpo[wandb]'.") from error
    from google.protobuf.message import DecodeError

    record: Any = getattr(messages, "Record")  # noqa: B009  # made at run time, so that no type checker sees it
    for frame in _frames(file):
        message = record()
        try:
            message.ParseFromString(frame)
        except DecodeError as error:
            raise UserError(f"{file} holds a record that is none of wandb's ({error}): restore it.") from error
        yield message


def _frames(file: Path) -> Iterator[bytes]:
    """The records of a log. What a run that was cut off has left of its last one is left out."""
    data = file.read_bytes()
    if data[: len(_HEADER)] != _HEADER:
        raise UserError(f"{file} is no log of wandb's: name the directory wandb of your runs.")
    at, parts = len(_HEADER) + 1, b""
    while at + _FRAME.size <= len(data):
        room = _BLOCK - at % _BLOCK
        if room < _FRAME.size:
            at += room
            continue
        checksum, length, kind = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length or not kind:
            return
        if zlib.crc32(bytes([kind]) + body) != checksum:
            raise UserError(f"{file} is damaged at byte {at}: its checksum does not fit; restore it from a backup.")
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
        at += _FRAME.size + length
