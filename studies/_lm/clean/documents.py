"""Reads documents from text files and tables, a few at a time, so that files may be larger than memory."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainer.errors import ConfigError, DataError
from trainer.files import formats, tables
from trainer.files.paths import expanded

LONGEST = 16 * 2**20  # bytes of a document
_BLOCK = 2**20
_ROWS = 256  # of a Parquet file that are read at once


class Document(NamedTuple):
    """A text, the name of its file within the source, and its row there: of a text file, the number of the document."""

    file: str
    row: int
    text: str


def files_of(source: str) -> list[tuple[str, Path]]:
    """Returns (name, path) of a file, or of all files in a directory and its subdirectories, in order of their names.

    Names that begin with a dot are left out. Raises DataError if there are none, or for an empty file.
    """
    path = expanded(source)
    if not path.exists():
        raise DataError(f"{source} is not there: give a text file, a table, or a directory of such.")
    files = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    files = [(name, file) for name, file in files if not any(part.startswith(".") for part in name.split("/"))]
    if not path.is_dir():
        files = [(path.name, path)]
    if not files:
        raise DataError(f"{source} holds no files: give a directory with text files or tables.")
    for _, file in files:
        if not file.stat().st_size:
            raise DataError(f"{file} is empty: give it text, or remove it.")
    return files


def documents(source: str, column: str, separator: str) -> Iterator[Document]:
    """Yields all documents, in order. Raises DataError, with the file and the row, for what cannot be read."""
    for name, file in files_of(source):
        for row, text in _read(file, column, separator):
            # Half of a surrogate pair, which JSON can spell, is not a character, and becomes a question mark.
            yield Document(name, row, text if text.isascii() else text.encode("utf-8", "replace").decode())


def _read(file: Path, column: str, separator: str) -> Iterator[tuple[int, str]]:
    try:
        if not formats.is_table(file):
            yield from _texts(file, separator.encode())
            return
        kind = formats.of_name(file)
        formats.refuse_other(file, kind)
        read = {formats.JSON_LINES: _json_lines, formats.PARQUET: _parquet, formats.ARROW: _arrow}
        read |= {formats.TFRECORD: _whole, formats.TAR: _whole}
        yield from read.get(kind, _csv)(file, column)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}): give a file that can be.") from error


def _whole(file: Path, column: str) -> Iterator[tuple[int, str]]:
    yield from enumerate(tables.read(file, [column], [column]).texts(column), 1)


def _texts(file: Path, separator: bytes) -> Iterator[tuple[int, str]]:
    with file.open("rb") as opened:
        row, rest = 1, b""
        for block in iter(partial(opened.read, _BLOCK), b""):
            *whole, rest = (rest + block).split(separator) if separator else [rest + block]
            for text in whole:
                yield row, _decoded(file, f"document {row}", text)
                row += 1
            _refuse_long(file, f"document {row}", rest, "name what divides its documents as the separator")
        if rest:
            yield row, _decoded(file, f"document {row}", rest)


def _json_lines(file: Path, column: str) -> Iterator[tuple[int, str]]:
    with file.open("rb") as opened:
        for number, line in enumerate(iter(partial(opened.readline, LONGEST + 1), b""), 1):
            _refuse_long(file, f"row {number}", line, "divide it")
            text = _decoded(file, f"line {number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                if formats.ends_in_comma(text):
                    raise DataError(f"{file} row {number} {formats.COMMA}.") from error
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"
                raise DataError(f"{file} row {number} cannot be read as JSON ({reason}): repair it.") from error
            if not isinstance(record, dict):
                raise DataError(f"{file} row {number} holds {type(record).__name__}: give an object with {column!r}.")
            if column not in record:
                raise _no_column(f"{file} row {number}", column, record)
            yield number, _text(f"{file} row {number}", column, record[column])


def _csv(file: Path, column: str) -> Iterator[tuple[int, str]]:
    csv.field_size_limit(LONGEST)
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = csv.reader(opened, strict=True)
        try:
            header = next(rows, [])
            formats.refuse_other_separator(file, header, (column,))
            if column not in header:
                raise _no_column(str(file), column, header)
            place = header.index(column)
            for row in rows:
                if row and len(row) != len(header):
                    raise DataError(
                        f"{file} row {rows.line_num} has {len(row)} columns and the header {len(header)}: repair it."
                    )
                if row:
                    yield rows.line_num, row[place]
        except csv.Error as error:
            raise DataError(f"{file} row {rows.line_num} cannot be read as CSV ({error}): repair it.") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 after row {rows.line_num} (byte 0x{error.object[error.start]:02x}): save it as "
                "UTF-8."
            ) from error


def _parquet(file: Path, column: str) -> Iterator[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            if column not in opened.schema_arrow.names:
                raise _no_column(str(file), column, opened.schema_arrow.names)
            batches = (
                batch.column(0).to_pylist() for batch in opened.iter_batches(_ROWS, columns=[column], use_threads=False)
            )
            yield from _values(file, column, batches)
    except pa.ArrowException as error:
        raise DataError(f"{file} cannot be read as Parquet ({str(error).splitlines()[0]}): write it anew.") from error


def _arrow(file: Path, column: str) -> Iterator[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.ipc

    try:
        with pa.memory_map(str(file)) as mapped, pyarrow.ipc.open_file(mapped) as opened:
            if column not in opened.schema.names:
                raise _no_column(str(file), column, opened.schema.names)
            batches = (
                opened.get_batch(number).column(column).to_pylist() for number in range(opened.num_record_batches)
            )
            yield from _values(file, column, batches)
    except pa.ArrowException as error:
        raise DataError(f"{file} cannot be read as Arrow ({str(error).splitlines()[0]}): write it anew.") from error


def _values(file: Path, column: str, batches: Iterable[list[object]]) -> Iterator[tuple[int, str]]:
    row = 0
    for values in batches:
        for value in values:
            row += 1
            text = _text(f"{file} row {row}", column, value)
            _refuse_long(file, f"row {row}", text, "divide it")
            yield row, text


def _text(where: str, column: str, value: object) -> str:
    """Returns the text of a cell, an empty one for a missing value; raises DataError for other types."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}, column {column!r} holds {type(value).__name__}: store it as text.")
    return value


def _decoded(file: Path, where: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} {where} is not UTF-8 (byte 0x{text[error.start]:02x} at {error.start}): save the file as UTF-8."
        ) from error


def _refuse_long(file: Path, where: str, text: bytes | str, fix: str) -> None:
    if len(text) > LONGEST:
        raise DataError(f"{file} {where} is longer than {LONGEST // 2**20} MiB, which memory is bounded by: {fix}.")


def _no_column(where: str, column: str, names: Iterable[str]) -> DataError:
    return DataError(f"{where} has no column {column!r}: it has {', '.join(names) or 'none'}; name its column of text.")


def refuse_same_place(source: str, out: str) -> None:
    """Raises ConfigError if the output would lie in the source, and be read as part of it."""
    if expanded(out).resolve().is_relative_to(expanded(source).resolve()):
        raise ConfigError(f"{out} lies in {source}, and would be read with it: name a directory elsewhere.")
