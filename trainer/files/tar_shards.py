"""Reads WebDataset shards: tar archives in which the files of a sample are adjacent. Torch-free.

The files of a sample share their name up to its first dot; the rest is the file's kind (`0007.jpg`, `0007.cls`).
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

# The key of a sample, and kind, place and size of each of its files.
Sample = tuple[str, list[tuple[str, int, int]]]
Cell = bytes | str | int | float | bool | list[object] | dict[str, object] | None
TEXT, JSON, CLASS = "txt", "json", "cls"


def scan(shard: Path) -> list[Sample]:
    """Returns the samples of a shard in their order. Raises DataError for other files, and OSError."""
    samples: list[Sample] = []
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not member.isfile() or not stem:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if not samples or samples[-1][0] != key:
                    samples.append((key, []))
                samples[-1][1].append((ending, member.offset_data, member.size))
    except tarfile.TarError as error:
        raise DataError(f"{shard} cannot be read as an uncompressed tar ({error}): write it anew.") from error
    return samples


def read_table(file: Path, texts: Sequence[str] = ()) -> pa.Table:
    """Returns the samples of a shard as a table: a column for each kind of file, and for each field of `json` files.

    `txt` and the columns `texts` are text in UTF-8, `cls` is a number, and others are bytes. Raises DataError.
    """
    import pyarrow as pa  # only here: it takes a quarter of a second to import

    samples = scan(file)
    if not samples:
        raise DataError(f"{file} holds no sample: write one at least, or leave the file out.")
    rows: list[dict[str, Cell]] = []
    with open(file, "rb") as archive:
        for key, files in samples:
            row: dict[str, Cell] = {}
            for ending, start, size in files:
                archive.seek(start)
                row |= _cells(f"{file}, file {key}.{ending}", ending, archive.read(size), ending in texts)
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, OverflowError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(f"{file} has samples that do not make a table ({reason}): give each kind one type.") from error


def _cells(where: str, ending: str, data: bytes, text: bool) -> dict[str, Cell]:
    try:
        if ending == JSON and not text:
            value = json.loads(data)
            return value if isinstance(value, dict) else {ending: value}
        if ending == CLASS and not text:
            return {ending: int(data)}
        return {ending: data.decode("utf-8") if text or ending == TEXT else data}
    except ValueError as error:
        raise DataError(f"{where} cannot be decoded ({error}): repair it, or leave it out.") from error
