"""Long tables of daily prices: reading them, and refusing what cannot be used. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from trainer.errors import DataError

PRICES = ("open", "high", "low", "close")
REQUIRED = ("date", "code", *PRICES, "volume")
OPTIONAL = ("sector", "adj_close")
JUMP = 0.40


@dataclass(frozen=True)
class Table:
    """Rows of a panel. `codes`, `sectors` index their names (sector -1: unknown); `columns` are float64, NaN missing.

    `first_row` is the number by which a reader of the file finds the first row: 2 in a CSV with its header, else 1.
    `unused` are the file's columns that nobody asked for.
    """

    source: str
    dates: np.ndarray
    codes: np.ndarray
    code_names: np.ndarray
    sectors: np.ndarray
    sector_names: np.ndarray
    columns: dict[str, np.ndarray]
    first_row: int
    unused: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.dates)

    def take(self, rows: np.ndarray) -> Table:
        return replace(
            self,
            dates=self.dates[rows],
            codes=self.codes[rows],
            sectors=self.sectors[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )


def read_table(path: str, features: Sequence[str] = ()) -> Table:
    """Read a Parquet file, or else a CSV: the market's columns, and of the others those that `features` names.

    Raises DataError naming file, row and column where there is one.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"data.path {path!r} is not a file: give a Parquet or CSV file.")
    parquet = file.suffix.lower() in (".parquet", ".pq")
    raw = _read_parquet(file) if parquet else _read_csv(file)
    missing = [name for name in REQUIRED if name not in raw.column_names]
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(map(repr, missing))}: it needs {', '.join(REQUIRED)}; "
            f"it has {', '.join(raw.column_names)}."
        )
    _check_features(path, features, raw.column_names)
    if raw.num_rows == 0:
        raise DataError(f"{path} has a header and no rows: give at least one row per stock and day.")
    used = [name for name in raw.column_names if name in (*REQUIRED, *OPTIONAL, *features)]
    unused = tuple(dict.fromkeys(name for name in raw.column_names if name not in used))
    return _convert(path, raw, used, unused, first_row=1 if parquet else 2)


def _check_features(path: str, features: Sequence[str], columns: list[str]) -> None:
    for name in features:
        if name in (*REQUIRED, *OPTIONAL):
            raise DataError(f"data.features names {name!r}, which is used as it is: name other columns only.")
        if name not in columns:
            others = [column for column in columns if column not in (*REQUIRED, *OPTIONAL)]
            there = f"it has {', '.join(others)}" if others else "it has none beside the market's"
            raise DataError(f"data.features names {name!r}, and {path} has no such column: {there}.")


def clean(table: Table) -> tuple[Table, dict[str, int]]:
    """Drop or blank what cannot be true, counting it: the data report.

    A repeated (date, code) keeps its first row; a row without a positive close goes; other non-positive prices and
    both ends of an inverted range become missing. Jumps are counted here and cut out of returns by `features`.
    """
    order = np.lexsort((table.codes, table.dates))
    repeated = np.zeros(len(table), dtype=bool)
    dates, codes = table.dates[order], table.codes[order]
    repeated[order[1:]] = (dates[1:] == dates[:-1]) & (codes[1:] == codes[:-1])
    columns = dict(table.columns)
    report = {"rows": len(table), "duplicate_rows": int(repeated.sum())}
    for name in (*PRICES, "volume", "adj_close"):
        if name in columns:
            values = columns[name]
            report[f"missing_{name}"] = int(np.isnan(values).sum())
            bad = (values < 0) if name == "volume" else (values <= 0)
            report[f"nonpositive_{name}" if name != "volume" else "negative_volume"] = int(bad.sum())
            columns[name] = np.where(bad, np.nan, values)
    inverted = columns["high"] < columns["low"]
    report["high_below_low"] = int(inverted.sum())
    for name in ("high", "low"):
        columns[name] = np.where(inverted, np.nan, columns[name])
    keep = ~repeated & ~np.isnan(columns["close"])
    report["dropped_rows"] = int((~keep).sum())
    if not keep.any():
        raise DataError(f"{table.source} has no row with a positive close: column 'close' cannot be used.")
    return replace(table, columns=columns).take(order[keep[order]]), report


def _read_parquet(file: Path) -> pa.Table:
    try:
        return pyarrow.parquet.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({_first_line(error)}): write it anew.") from error


def _read_csv(file: Path) -> pa.Table:
    _check_encoding(file)
    if not file.read_bytes().strip():
        raise DataError(f"{file} is empty: it needs a header with {', '.join(REQUIRED)}.")
    texts = {name: pa.string() for name in ("code", "sector")}
    try:
        return pyarrow.csv.read_csv(
            file,
            # One thread, so that an error names its row.
            read_options=pyarrow.csv.ReadOptions(use_threads=False),
            convert_options=pyarrow.csv.ConvertOptions(column_types=texts, strings_can_be_null=True),
        )
    except pa.ArrowException as error:
        reason = _first_line(error)
        if ragged := re.search(r"Row #(\d+): (Expected \d+ columns, got \d+)", reason):
            raise DataError(f"{file} row {ragged[1]} is ragged ({ragged[2].lower()}): repair it.") from error
        raise DataError(f"{file} cannot be read as CSV ({reason}): repair it.") from error


def _check_encoding(file: Path) -> None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} row {number} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}): "
                    "save the file as UTF-8."
                ) from error


def _convert(path: str, raw: pa.Table, used: list[str], unused: tuple[str, ...], first_row: int) -> Table:
    repeated = sorted({name for name in used if used.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has the column {repeated[0]!r} twice: rename or remove one.")
    codes, code_names = _encode(path, raw, "code", first_row)
    sectors, sector_names = np.full(raw.num_rows, -1, dtype=np.int32), np.array([], dtype=str)
    if "sector" in raw.column_names:
        sectors, sector_names = _encode(path, raw, "sector", first_row, nullable=True)
    numeric = [name for name in used if name not in ("date", "code", "sector")]
    return Table(
        source=path,
        dates=_dates(path, raw, first_row),
        codes=codes,
        code_names=code_names,
        sectors=sectors,
        sector_names=sector_names,
        columns={name: _numbers(path, raw, name, first_row) for name in numeric},
        first_row=first_row,
        unused=unused,
    )


def _encode(
    path: str, raw: pa.Table, name: str, first_row: int, nullable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(index per row, names in order); a missing value is -1 where allowed."""
    column = raw[name].cast(pa.string())
    if column.null_count and not nullable:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0]) + first_row
        raise DataError(f"{path} row {row}, column {name!r} is empty: every row needs a {name}.")
    encoded = column.combine_chunks().dictionary_encode()
    names = np.array(encoded.dictionary.to_pylist(), dtype=str)
    order = np.argsort(names)
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
    return np.where(indices < 0, -1, place[indices] if len(place) else -1).astype(np.int32), names[order]


def _dates(path: str, raw: pa.Table, first_row: int) -> np.ndarray:
    """Days [rows] as datetime64[D], from dates, timestamps, ISO text or YYYYMMDD."""
    column = raw["date"]
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0]) + first_row
        raise DataError(f"{path} row {row}, column 'date' is empty: every row needs a date.")
    if pa.types.is_temporal(column.type):
        return column.cast(pa.timestamp("us")).to_numpy().astype("datetime64[D]")
    texts = column.cast(pa.string()).to_pylist()
    days = np.empty(len(texts), dtype="datetime64[D]")
    for i, text in enumerate(texts):
        try:
            days[i] = np.datetime64(f"{text[:4]}-{text[4:6]}-{text[6:]}" if text.isdigit() else text[:10], "D")
        except ValueError as error:
            raise DataError(
                f"{path} row {i + first_row}, column 'date' is {text!r}: write dates as 2018-02-07."
            ) from error
    return days


def _numbers(path: str, raw: pa.Table, name: str, first_row: int) -> np.ndarray:
    column = raw[name]
    kind = column.type
    if (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        values = column.cast(pa.float64()).to_numpy().astype(np.float64)
        return np.where(np.isfinite(values), values, np.nan)
    if pa.types.is_null(kind):
        return np.full(raw.num_rows, np.nan)
    for i, value in enumerate(column.to_pylist()):
        try:
            float(value if value is not None else "nan")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{path} row {i + first_row}, column {name!r} is {str(value)[:40]!r}: it must be a number."
            ) from error
    raise DataError(f"{path}, column {name!r} is stored as {kind}: store it as numbers.")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")[:200]
