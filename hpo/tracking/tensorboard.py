"""Writes a study as TensorBoard's event files: one per trial, scalars with the ledger's times, and the HParams page.

A record is its length, that length's CRC, the data and their CRC (TFRecord). TensorBoard keeps scalars as float32.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS, STATUS_UNKNOWN
from tensorboard.plugins.hparams.metadata import (
    NULL_TENSOR,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    create_summary_metadata,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter

from hpo.tracking.base import Point
from hpo.tracking.run_folders import FolderTracker
from trainer.runtime.failpoint import failpoint

FILE = "events.out.tfevents.0000000001.hpo"  # TensorBoard recognizes files with a name of this form
_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_VERSION = "brain.Event:2"
_STATUS = {
    "FINISHED": STATUS_SUCCESS,
    "KILLED": STATUS_FAILURE,
    "FAILED": STATUS_FAILURE,
}


class TensorBoardTracker(FolderTracker):
    """Writes files that `tensorboard --logdir DIR` shows."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._ends: dict[Path, int] = {}  # where the last whole event of each file written here ends

    def read(self, folder: Path) -> list[Point]:
        return [
            Point(value.tag, event.step, round(event.wall_time * 1000), value.simple_value)
            for event, _ in _events(folder / FILE)
            for value in event.summary.value
            if value.WhichOneof("value") == "simple_value"
        ]

    def append(self, folder: Path, points: Sequence[Point]) -> None:
        events = [
            Event(
                wall_time=point.timestamp / 1000,
                step=point.step,
                summary=Summary(value=[Summary.Value(tag=point.key, simple_value=point.value)]),
            )
            for point in sorted(points, key=lambda point: (point.step, point.timestamp))
        ]
        self._add(folder / FILE, events)

    def show(self, folder: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        """Writes a trial's parameters as a session of the HParams page, once, and its final status, once."""
        shown = {SESSION_START_INFO_TAG: _start(now)} if now["params"] and not before["params"] else {}
        if now["params"] and now["ended_at"] is not None and before["ended_at"] is None:
            shown[SESSION_END_INFO_TAG] = _end(now)
        if shown:
            tags = {value.tag for event, _ in _events(folder / FILE) for value in event.summary.value}
            self._add(folder / FILE, [_hparams(tag, data, now) for tag, data in shown.items() if tag not in tags])

    def _add(self, file: Path, events: Sequence[Event]) -> None:
        """Writes events durably after the last whole one. Scans a file that has changed since it was written here."""
        if not events:
            return
        end = self._ends.get(file, -1)
        if not file.exists() or file.stat().st_size != end:
            end = max((end for _, end in _events(file)), default=0)
        with file.open("r+b" if file.exists() else "wb") as stream:
            stream.truncate(end)
            stream.seek(end)
            writer = RecordWriter(stream)
            first = [] if end else [Event(wall_time=events[0].wall_time, file_version=_VERSION)]
            for event in [*first, *events]:
                writer.write(event.SerializeToString())
            stream.flush()
            failpoint("mirror.after_append")
            os.fsync(stream.fileno())
            self._ends[file] = stream.tell()


def _start(record: Mapping[str, Any]) -> HParamsPluginData:
    info = SessionStartInfo(group_name=record["name"], start_time_secs=record["started_at"] / 1000)
    for path, text in record["params"].items():
        try:
            info.hparams[path].number_value = float(text)
        except ValueError:
            info.hparams[path].string_value = text
    return HParamsPluginData(session_start_info=info)


def _end(record: Mapping[str, Any]) -> HParamsPluginData:
    status = _STATUS.get(record["status"], STATUS_UNKNOWN)
    info = SessionEndInfo(status=status, end_time_secs=record["ended_at"] / 1000)
    return HParamsPluginData(session_end_info=info)


def _hparams(tag: str, data: HParamsPluginData, record: Mapping[str, Any]) -> Event:
    value = Summary.Value(tag=tag, metadata=create_summary_metadata(data), tensor=NULL_TENSOR)
    at = record["started_at"] if record["ended_at"] is None else record["ended_at"]
    return Event(wall_time=at / 1000, summary=Summary(value=[value]))


def _events(file: Path) -> Iterator[tuple[Event, int]]:
    """Yields each whole event and the offset of its end; stops at one that is cut off or damaged."""
    data = file.read_bytes() if file.exists() else b""
    at = 0
    while at + _HEADER.size <= len(data):
        length, crc = _HEADER.unpack_from(data, at)
        body, end = at + _HEADER.size, at + _HEADER.size + length + _CRC.size
        if crc != masked_crc32c(data[at : at + 8]) or end > len(data):
            return
        if _CRC.unpack_from(data, end - _CRC.size)[0] != masked_crc32c(data[body : body + length]):
            return
        yield Event.FromString(data[body : body + length]), end
        at = end
