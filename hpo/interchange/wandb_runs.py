"""Reads runs of Weights & Biases: the run-ID.wandb files in wandb/, or the table that its pages export.

A .wandb file is a log of records in blocks of 32 KiB, after a header of seven bytes. Its format is that of LevelDB's
log with zlib's checksum. wandb no longer has a Python reader for it; its protocol messages describe a record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.door import option
from hpo.errors import UserError
from hpo.interchange import table
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, State, judged_by
from hpo.interchange.texts import as_number, as_time, flat, loads
from hpo.text import counted, near
from trainer.quote import quoted

_HEADER, _BLOCK, _FRAME = b":W&B\xe1\xbe", 32 * 1024, struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _LAST = 1, 2, 4
_ODD = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass
class _Run:
    """A run, assembled from its records."""

    id: str
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, dict[int, Point]] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None  # None until the run ends


def read(
    path: str,
    project: str | None,
    metrics: Sequence[str] = (),
    directions: Sequence[str] = (),
    *,
    params: Sequence[str] = (),
) -> ImportedStudy:
    """Returns the runs of that project, or of the only one, below a directory, or a CSV's rows. Raises UserError."""
    source = Path(path).expanduser()
    if source.is_file() and source.suffix != ".wandb":
        return table.read(path, project, metrics, directions, params=params, tool="wandb")
    if params:
        raise UserError(
            f"{option('param', params[0])}: the runs of {path} say what is configured: leave the option out."
        )
    files = [source] if source.is_file() else sorted(source.rglob("*.wandb"))
    if not files:
        raise UserError(
            f"{path} holds no run-ID.wandb: name the directory wandb of your runs, or an exported CSV file."
        )
    runs = _runs(files)
    name = _chosen(sorted({run.project for run in runs}), project, path)
    of_project = [run for run in runs if run.project == name]
    ended_runs = [run for run in of_project if run.exit_code is not None]
    objectives = judged_by(metrics, directions, {metric for run in ended_runs for metric in run.curves}, path)
    trials = [_trial(run, [objective.metric for objective in objectives]) for run in ended_runs]
    left = (
        [f"{counted(len(of_project) - len(ended_runs), 'run')} without an end, which may run still"]
        if len(of_project) > len(ended_runs)
        else []
    )
    left += ["media, artifacts and system metrics, which stay where they are"]
    return ImportedStudy("wandb", name, path, tuple(objectives), trials, {}, left)


def _runs(files: Sequence[Path]) -> list[_Run]:
    """Returns the runs, oldest first; the files of a resumed run are one run."""
    runs: dict[str, _Run] = {}
    for file in files:
        current: _Run | None = None
        for record in _records(file):
            kind = record.WhichOneof("record_type")
            try:
                if kind == "run":
                    current = runs.setdefault(record.run.run_id, _Run(record.run.run_id))
                    _begin(current, record.run)
                elif current is not None:
                    _follow(current, kind, record)
            except ValueError as error:
                raise UserError(
                    f"{file}, record {record.num}, is damaged ({error}): restore it from a backup."
                ) from error
    return sorted(runs.values(), key=lambda run: (run.started or 0.0, run.id))


def _chosen(projects: Sequence[str], given: str | None, path: str) -> str:
    if given is not None and given not in projects:
        hint = near(given, projects) or f": name one by {option('project')}."
        raise UserError(f"{path} has no project {given!r} (it has {', '.join(projects) or 'none'}){hint}")
    if given is None and len(projects) != 1:
        raise UserError(f"{path} has runs of {', '.join(projects) or 'no project'}: name one by {option('project')}.")
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
    for change in record.update:
        name = ".".join(change.nested_key) or change.key
        if name.partition(".")[0] != "_wandb":
            run.config |= flat({name: loads(change.value_json)}, ".")


def _follow(run: _Run, kind: str, record: Any) -> None:
    if kind == "config":
        _configure(run, record.config)
    elif kind == "history":
        _report(run, record.history)
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _report(run: _Run, history: Any) -> None:
    items = {".".join(field.nested_key) or field.key: loads(field.value_json) for field in history.item}
    step, timestamp = items.get("_step", history.step.num), as_time(items.get("_timestamp"))
    if not isinstance(step, int):
        raise ValueError(f"its _step is {quoted(step)}")
    run.ended = timestamp if timestamp is not None else run.ended
    for metric, value in flat(items, ".").items():
        number = as_number(_ODD.get(value) if isinstance(value, str) else value)
        if metric[:1] != "_" and number is not None:
            run.curves.setdefault(metric, {})[step] = Point(step, number, timestamp)


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
    """Yields the messages of a file. Raises UserError if it is damaged or wandb is missing."""
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
    """Yields the records of a log, without an incomplete last record of an interrupted run."""
    data = file.read_bytes()
    if data[: len(_HEADER)] != _HEADER:
        raise UserError(f"{file} is not a wandb log: name the directory wandb of your runs.")
    offset, parts = len(_HEADER) + 1, b""
    while offset + _FRAME.size <= len(data):
        room = _BLOCK - offset % _BLOCK
        if room < _FRAME.size:
            offset += room
            continue
        checksum, length, kind = _FRAME.unpack_from(data, offset)
        body = data[offset + _FRAME.size : offset + _FRAME.size + length]
        if len(body) < length or not kind:
            return
        if zlib.crc32(bytes([kind]) + body) != checksum:
            raise UserError(f"{file} is damaged at byte {offset}: its checksum does not fit; restore it from a backup.")
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
        offset += _FRAME.size + length
