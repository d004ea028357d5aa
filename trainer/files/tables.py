"""Reads tables (Parquet, Arrow, CSV, JSON Lines, TFRecord, tar), and refuses unusable values, naming row and column.
Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.json
import pyarrow.parquet

from trainer.errors import DataError
from trainer.files import formats, tar_shards, tfrecord

LEVELS = 200  # of a JSON value
_QUOTED, _BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"'), re.compile(rb"[\[\]{}]")
_ARROW_FILES = (b"ARROW1", b"FEA1")  # how an Arrow file begins; a stream, as `datasets` saves it, has no such mark


@dataclass(frozen=True)
class Source:
    """A table read from a file of the format `kind` (trainer/files/formats.py)."""

    path: str
    table: pa.Table
    kind: str

    @property
    def columns(self) -> list[str]:
        return self.table.column_names

    def require(self, names: Sequence[str]) -> None:
        """Raises DataError unless each column occurs once and there is a row."""
        self.require_columns(names)
        if self.table.num_rows == 0:
            raise DataError(f"{self.path} has a header and no rows: give at least one row.")
        self.refuse_repeated(names)

    def require_columns(self, names: Sequence[str]) -> None:
        if missing := [name for name in names if name not in self.columns]:
            raise DataError(
                f"{self.path} has no column {', '.join(map(repr, missing))}: it needs {', '.join(names)}; "
                f"it has {', '.join(self.columns)}."
            )

    def refuse_repeated(self, names: Iterable[str]) -> None:
        for name in names:
            if self.columns.count(name) > 1:
                raise DataError(f"{self.path} has the column {name!r} twice: rename or remove one.")

    def values(self, name: str) -> list[Any]:
        """Returns a column [rows] as Python values; raises DataError for a type that Python does not have."""
        try:
            return self.table[name].to_pylist()
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a date after the year 9999
            raise self._unfit(name, f"{_first_line(error)}: store it as text") from error

    def _unfit(self, name: str, fix: str) -> DataError:
        return DataError(f"{self.path}, column {name!r} is stored as {self.table[name].type}: {fix}.")

    def refuse_missing(self, name: str) -> None:
        """Raises DataError if the column has a null."""
        if self.table[name].null_count:
            row = int(np.flatnonzero(self.table[name].is_null().to_numpy())[0])
            raise DataError(f"{self.cell(row, name)} is empty: every row needs a {name}.")

    def cell(self, row: int, name: str) -> str:
        """Returns `FILE row N, column 'name'` of a row counted from 0.

        N counts the file's lines from 1, empty ones too.
        """
        record = row + 2 if self.kind == formats.CSV else row + 1
        return f"{self.path} {_row(self.path, record, self.kind)}, column {name!r}"

    def floats(self, name: str) -> np.ndarray:
        """Returns a column [rows] as float64; missing and non-finite values are NaN."""
        if pa.types.is_null(self.table[name].type):
            return np.full(self.table.num_rows, np.nan)
        self._refuse_text(name)
        values = self.as_floats(name)
        return np.where(np.isfinite(values), values, np.nan)

    def as_floats(self, name: str) -> np.ndarray:
        """Returns a column [rows] of numbers as float64, which rounds above 2^53; missing values are NaN."""
        try:
            return self.table[name].cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        except pa.ArrowException as error:
            raise self._unfit(name, "store it as numbers") from error

    def numbers(self, name: str) -> np.ndarray:
        """Returns a column [rows] in its own type, decimals as float64; refuses missing and non-finite values."""
        self.refuse_missing(name)
        self._refuse_text(name)
        column = self.table[name]
        values = (column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column).to_numpy()
        if len(bad := np.flatnonzero(~np.isfinite(values))):
            raise DataError(f"{self.cell(int(bad[0]), name)} is {values[bad[0]]}: it must be a finite number.")
        return values

    def texts(self, name: str) -> list[str]:
        """Returns a column [rows] of text; refuses missing values."""
        self.refuse_missing(name)
        kind = self.table[name].type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(values) or pa.types.is_large_string(values)):
            raise DataError(f"{self.path}, column {name!r} is stored as {kind}: store it as text.")
        return self.table[name].to_pylist()

    def written(self, name: str) -> pa.ChunkedArray:
        """Returns a column [rows] as text, with numbers written out.

        Raises DataError for other values, such as lists.
        """
        column = self.table[name]
        try:
            return column.cast(pa.string())
        except pa.ArrowException as error:
            raise DataError(f"{self.path}, column {name!r} is stored as {column.type}: store it as text.") from error

    def _refuse_text(self, name: str) -> None:
        kind = self.table[name].type
        tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
        if any(test(kind) for test in tests):
            return
        for row, value in enumerate(self.values(name)):
            try:
                pa.scalar(value.strip() if isinstance(value, str) else value).cast(pa.float64())  # float() takes 1_000
            except pa.ArrowException as error:
                raise DataError(f"{self.cell(row, name)} is {str(value)[:40]!r}: it must be a number.") from error
        raise self._unfit(name, "store it as numbers")


def read(path: str | Path, required: Sequence[str] = (), texts: Sequence[str] = ()) -> Source:
    """Reads a file by its suffix; as CSV if that is unknown.

    `texts` are columns of text: their values stay as they are written in a CSV or JSON Lines. In a CSV's column of text
    only an empty cell is missing; in one of numbers also a marker of a missing number, such as NA. Raises DataError,
    naming file, row and column if known, also for a missing `required` column.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path} is not a file: give a Parquet, Arrow, CSV, JSON Lines, TFRecord or tar file.")
    kind = formats.of_name(file)
    formats.refuse_other(file, kind)
    if kind == formats.PARQUET:
        table = _binary(file, kind, pyarrow.parquet.read_table)
    elif kind == formats.ARROW:
        table = _binary(file, kind, read_arrow)
    elif kind == formats.JSON_LINES:
        table = _read_json(file, texts)
    elif kind == formats.TFRECORD:
        table = tfrecord.read_table(file, texts)
    elif kind == formats.TAR:
        table = tar_shards.read_table(file, texts)
    else:
        table = _read_csv(file, required, texts)
    source = Source(str(path), table, kind)
    source.require(required)
    return source


def _binary(file: Path, kind: str, reader) -> pa.Table:
    try:
        return reader(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as {kind} ({_first_line(error)}): write it anew.") from error


def row_groups(file: Path) -> list[int]:
    """Returns the number of rows of each row group of a Parquet file that has any. Raises DataError."""
    formats.refuse_other(file, formats.PARQUET)
    about = _binary(file, formats.PARQUET, pyarrow.parquet.read_metadata)
    return [about.row_group(number).num_rows for number in range(about.num_row_groups)]


def row_group(file: Path, number: int, columns: Sequence[str] = ()) -> pa.Table:
    """Returns a row group of a Parquet file, `columns` or all. Raises DataError, also for a column that is missing."""

    def read(path: Path) -> pa.Table:
        with pyarrow.parquet.ParquetFile(path) as opened:
            Source(str(file), opened.schema_arrow.empty_table(), formats.PARQUET).require_columns(columns)
            return opened.read_row_group(number, columns=list(columns) or None)

    return _binary(file, formats.PARQUET, read)


def read_arrow(file: Path) -> pa.Table:
    """Reads an Arrow file, or an Arrow stream as the library `datasets` saves it. Raises ArrowException or OSError."""
    with open(file, "rb") as opened:
        beginning = opened.read(max(map(len, _ARROW_FILES)))
    if beginning.startswith(_ARROW_FILES):
        return pyarrow.feather.read_table(file)
    with pa.OSFile(str(file)) as opened, pa.ipc.open_stream(opened) as stream:
        return stream.read_all()


def _read_csv(file: Path, required: Sequence[str], texts: Sequence[str]) -> pa.Table:
    if not _check_text(file):
        raise DataError(f"{file} is empty: it needs a header" + (f" with {', '.join(required)}." if required else "."))
    try:
        table = pyarrow.csv.read_csv(
            file,
            # One thread, so that an error names its row.
            read_options=pyarrow.csv.ReadOptions(use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types={name: pa.string() for name in texts}),
        )
    except pa.ArrowException as error:
        formats.refuse_other_separator(file, [_header(file)], tuple(required))
        reason = _first_line(error)
        if ragged := re.search(r"Row #(\d+): (Expected \d+ columns, got \d+)", reason):
            raise DataError(
                f"{file} {_row(file, int(ragged[1]), formats.CSV)} is ragged ({ragged[2].lower()}): repair it."
            ) from error
        raise DataError(f"{file} cannot be read as CSV ({reason}): repair it.") from error
    formats.refuse_other_separator(file, table.column_names, tuple(required))
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table.column(index)
            empty = pc.equal(column, "")  # pyright: ignore[reportAttributeAccessIssue]
            missing = pa.scalar(None, field.type)
            table = table.set_column(index, field, pc.if_else(empty, missing, column))  # pyright: ignore[reportAttributeAccessIssue]
    return table


def _header(file: Path) -> str:
    with file.open(encoding="utf-8-sig") as lines:
        return next((line.rstrip("\r\n") for line in lines if line.strip()), "")


def _read_json(file: Path, texts: Sequence[str]) -> pa.Table:
    if not _check_text(file):
        raise DataError(f"{file} is empty: it needs one JSON object per line.")
    _check_levels(file)
    size = min(file.stat().st_size + 1, 2**31 - 1)  # one block, so that an error counts rows from the file's first
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=size)
    try:
        table = pyarrow.json.read_json(file, options)
        # Text that looks like a time is read as one unless the schema says otherwise; a column in the schema is created
        # even if the file has none, so only existing ones are named.
        changed = [name for name in texts if name in table.column_names and pa.types.is_temporal(table[name].type)]
        if changed:
            schema = pa.schema([(name, pa.string()) for name in changed])
            table = pyarrow.json.read_json(file, options, pyarrow.json.ParseOptions(explicit_schema=schema))
        return table
    except pa.ArrowException as error:
        with file.open(encoding="utf-8-sig") as lines:
            if number := next((n for n, line in enumerate(lines, 1) if formats.ends_in_comma(line)), None):
                raise DataError(f"{file} row {number} {formats.COMMA}.") from error
        reason = _first_line(error)
        row = re.search(r" in row (\d+)$", reason)
        where = f" {_row(file, int(row[1]) + 1, formats.JSON_LINES)}" if row else ""
        reason = reason[: row.start()] if row else reason
        raise DataError(f"{file}{where} cannot be read as JSON Lines ({reason}): repair it.") from error


def _check_levels(file: Path) -> None:
    """Raises DataError for a line nested deeper than LEVELS, which may crash the process in the JSON reader."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.count(b"[") + line.count(b"{") <= LEVELS:
                continue
            level = 0
            for bracket in _BRACKETS.findall(_QUOTED.sub(b"", line)):
                level += 1 if bracket in b"[{" else -1
                if level > LEVELS:
                    raise DataError(f"{file} row {number} has more than {LEVELS} levels: make its values flatter.")


def _check_text(file: Path) -> bool:
    """Returns True if there is anything but white space in the file; raises DataError if it is not UTF-8."""
    anything = False
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            anything = anything or bool(line.strip())
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}): "
                    "save the file as UTF-8."
                ) from error
    return anything


def _row(path: str | Path, record: int, kind: str) -> str:
    """Returns words for the record, counted from 1 without empty lines but with a header, by its first line."""
    if kind not in (formats.CSV, formats.JSON_LINES):
        return f"row {record}"
    header = f" (the header is row {_line(path, 1, kind)})" if kind == formats.CSV else ""
    return f"row {_line(path, record, kind)}{header}"


def _line(path: str | Path, record: int, kind: str) -> int:
    csv, left, quoted = kind == formats.CSV, record, False
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not quoted and (line.strip(b"\r\n") if csv else line.strip()):
                left -= 1
                if left == 0:
                    return number
            quoted = quoted != (csv and line.count(b'"') % 2 == 1)  # a value in quotes goes on in the next line
    return record  # JSON objects that share a line are counted by record


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")[:200]
