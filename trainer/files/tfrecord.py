"""Reads TFRecord files: records framed by their length, with CRC32C checks, and the Examples in them. Torch-free.

A record is its length (uint64), the length's checksum (uint32), its bytes, and their checksum, little-endian. A
checksum is a CRC32C, rotated right by 15 bits, plus a constant (https://www.tensorflow.org/tutorials/load_data/tfrecord).
google-crc32c and protobuf, the extra `tfrecord`, are imported when a file is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from trainer.errors import ConfigError, DataError
from trainer.files.protobuf import BYTES, FLOAT, INT64, STRING, Field, message_type

if TYPE_CHECKING:
    import pyarrow as pa

_MASK = 0xA282EAD8
_HEAD, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_MISSING = "TFRecord files need google-crc32c and protobuf: pip install 'hpo[tfrecord]'."
_AGAIN = "copy or write the file anew"
Value = list[bytes] | list[float] | list[int]


def checksum(data: bytes) -> int:
    """Returns the masked CRC32C of a record. Raises ConfigError if the extra is missing."""
    try:
        from google_crc32c import value
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    crc = value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def scan(file: Path) -> list[tuple[int, int]]:
    """Returns place and size of each record's bytes.

    Raises DataError for a length whose checksum differs and for a record that is cut off; `record` checks the bytes.
    """
    places: list[tuple[int, int]] = []
    end, start = file.stat().st_size, 0
    with open(file, "rb") as opened:
        while start < end:
            where = f"{file}, record {len(places) + 1}"
            head = opened.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DataError(f"{where} is cut off after {len(head)} of {_HEAD.size} bytes of its head: {_AGAIN}.")
            size, expected = _HEAD.unpack(head)
            if checksum(head[:8]) != expected:
                raise DataError(f"{where} has another checksum of its length than the file says: {_AGAIN}.")
            start += _HEAD.size
            if start + size + _CHECKSUM.size > end:
                raise DataError(f"{where} is cut off after {end - start} of {size + _CHECKSUM.size} bytes: {_AGAIN}.")
            places.append((start, size))
            start += size + _CHECKSUM.size
            opened.seek(start)
    return places


def record(opened: BinaryIO, number: int, place: tuple[int, int]) -> bytes:
    """Returns the bytes of record `number`, counted from 1. Raises DataError if their checksum differs."""
    start, size = place
    opened.seek(start)
    data, expected = opened.read(size), opened.read(_CHECKSUM.size)
    if len(data) < size or len(expected) < _CHECKSUM.size or checksum(data) != _CHECKSUM.unpack(expected)[0]:
        raise DataError(f"{opened.name}, record {number} has another checksum than the file says: {_AGAIN}.")
    return data


class _List(Protocol):
    value: Iterable[bytes] | Iterable[float] | Iterable[int]


class _Feature(Protocol):
    bytes_list: _List
    float_list: _List
    int64_list: _List

    def HasField(self, field_name: str) -> bool: ...


class _Entry(Protocol):
    key: str
    value: _Feature


class _Features(Protocol):
    feature: Sequence[_Entry]


class _Example(Protocol):
    features: _Features

    def ParseFromString(self, serialized: bytes) -> int: ...


def example(data: bytes, where: str) -> dict[str, Value]:
    """Returns the features of a tf.train.Example. Raises DataError, which begins with `where`, for other bytes."""
    from google.protobuf.message import DecodeError

    message = cast("_Example", _example_type()())
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise DataError(f"{where} cannot be parsed as a tf.train.Example: write its values as one.") from error
    features: dict[str, Value] = {}
    for entry in message.features.feature:
        kind = next((kind for kind in _LISTS if entry.value.HasField(kind)), None)
        features[entry.key] = cast("Value", [] if kind is None else [*getattr(entry.value, kind).value])
    return features


_LISTS = ("bytes_list", "float_list", "int64_list")
# A map is, by its bytes, repeated entries of key and value.
_MESSAGES: Mapping[str, Sequence[Field]] = {
    "BytesList": [("value", 1, BYTES, True)],
    "FloatList": [("value", 1, FLOAT, True)],
    "Int64List": [("value", 1, INT64, True)],
    "Feature": [
        ("bytes_list", 1, "BytesList", False),
        ("float_list", 2, "FloatList", False),
        ("int64_list", 3, "Int64List", False),
    ],
    "Entry": [("key", 1, STRING, False), ("value", 2, "Feature", False)],
    "Features": [("feature", 1, "Entry", True)],
    "Example": [("features", 1, "Features", False)],
}


@cache
def _example_type() -> type[object]:
    """Returns protobuf's class of tf.train.Example."""
    return message_type(_MESSAGES, "Example", _MISSING)


def read_table(file: Path, texts: Sequence[str] = ()) -> pa.Table:
    """Returns the Examples of a file as a table, a feature as a column: of values, or of lists if one has several.

    Bytes of the columns `texts` are text in UTF-8. A feature that a record lacks is missing. Raises DataError.
    """
    import pyarrow as pa  # only here: it takes a quarter of a second to import

    places = scan(file)
    if not places:
        raise DataError(f"{file} holds no record: write one at least, or leave the file out.")
    rows: list[dict[str, Value]] = []
    with open(file, "rb") as opened:
        for number, place in enumerate(places, 1):
            rows.append(example(record(opened, number, place), f"{file}, record {number}"))
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _column(file, name, [row.get(name) for row in rows], name in texts) for name in names})


def _column(file: Path, name: str, values: Sequence[Value | None], text: bool) -> pa.Array:
    import pyarrow as pa

    if text:
        values = [_decoded(file, name, number, value) for number, value in enumerate(values, 1)]  # pyright: ignore
    kinds = {type(part) for value in values if value for part in value}
    if len(kinds) > 1:
        words = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"{file}, feature {name!r} is {words} in different records: write it as one of them.")
    stored = {bytes: pa.binary(), float: pa.float32(), int: pa.int64(), str: pa.string()}
    kind = stored[kinds.pop()] if kinds else pa.null()
    if all(len(value) <= 1 for value in values if value):
        return pa.array([value[0] if value else None for value in values], kind)
    return pa.array(values, pa.list_(kind))


def _decoded(file: Path, name: str, number: int, value: Value | None) -> list[str] | Value | None:
    if not value or not isinstance(value[0], bytes):
        return value
    try:
        return [part.decode("utf-8") for part in cast("list[bytes]", value)]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}, record {number}, feature {name!r} is not UTF-8 (byte {error.start}): write it as UTF-8."
        ) from error
