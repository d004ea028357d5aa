"""What the libraries of other trackers read of what was written for them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Scalars = dict[tuple[str, int], tuple[float, float]]  # (key, step) -> (seconds since the epoch, value)


def tensorboard(folder: Path) -> Scalars:
    """By TensorBoard's own reader; AssertionError where a point stands twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = [((tag, e.step), (e.wall_time, e.value)) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    assert len(found) == len(dict(found)), "a point stands twice"
    return dict(found)


def wandb(run: Path) -> Scalars:
    """Of an offline run, by W&B's own messages."""
    found: Scalars = {}
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for key in items.keys() - {"_timestamp", "_runtime", "_step"}:
                assert (key, items["_step"]) not in found, "a point stands twice"
                found[key, items["_step"]] = items["_timestamp"], items[key]
    return found


def wandb_records(run: Path) -> Iterator[Any]:
    """The records of the one file of an offline run: a log of LevelDB's form after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = run.glob("*.wandb")
    data, at, part = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header begins so late in a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""
