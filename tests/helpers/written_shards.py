"""Writes the same rows as shards of any format, and puts them into a bucket."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

from trainer.files.s3 import Bucket

Row = Mapping[str, str | int]


def varint(value: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    parts = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([part | 128 for part in parts[:-1]] + parts[-1:])


def field(number: int, data: bytes) -> bytes:
    """A field of protobuf with a length: bytes, a message, or packed numbers."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(row: Mapping[str, str | bytes | int | float | Sequence[float]]) -> bytes:
    """A tf.train.Example by the wire format of protobuf, without its library."""
    entries = b""
    for name, value in row.items():
        if isinstance(value, (str, bytes)):
            feature = field(1, field(1, value.encode() if isinstance(value, str) else value))
        elif isinstance(value, int):
            feature = field(3, field(1, varint(value)))
        else:
            floats = [value] if isinstance(value, float) else value
            feature = field(2, field(1, struct.pack(f"<{len(floats)}f", *floats)))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def crc32c(data: bytes) -> int:
    """Castagnoli's polynomial, bit by bit: RFC 3720, section 12.1."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + masked(head) + data + masked(data)


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Writes the rows in the format of the path's suffix; `.parquet` in row groups of three."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table, kind = pa.Table.from_pylist([dict(row) for row in rows]), path.name.partition(".")[2].partition("-")[0]
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=3)
    elif kind == "feather":
        pa.feather.write_feather(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, 3)
    elif kind == "csv":
        pa.csv.write_csv(table, path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "tfrecord":
        path.write_bytes(b"".join(framed(example(row)) for row in rows))
    else:
        write_tar(path, {f"{number:04}.json": json.dumps(row).encode() for number, row in enumerate(rows)})
    return path


def write_tar(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def put(url: str, *files: Path) -> str:
    """Puts files below the URL of a bucket, by their names."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for file in files:
        Bucket(f"s3://{bucket}").upload(file, f"{prefix}/{file.name}")
    return url
