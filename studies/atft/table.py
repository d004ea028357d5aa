"""Reads long tables of daily prices, and refuses unusable ones. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer.errors import DataError
from trainer.files import tables

PRICES = ("open", "high", "low", "close")
REQUIRED = ("date", "code", *PRICES, "volume")
OPTIONAL = ("sector", "adj_close")
TEXTS = ("date", "code", "sector")  # a date as text keeps its own clock
JUMP = 0.40
ABSURD = 1e30  # larger than any price, volume or feature; its products would overflow float32


@dataclass(frozen=True)
class Table:
    """Rows of a panel. `codes`, `sectors` index their names (sector -1: unknown); `columns` are float64, NaN missing.

    `unused` are the file's columns that were not requested.
    """

    source: str
    dates: np.ndarray
    codes: np.ndarray
    code_names: np.ndarray
    sectors: np.ndarray
    sector_names: np.ndarray
    columns: dict[str, np.ndarray]
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
    """Reads a file: the market's columns, and of the others the ones that `features` names.

    Raises DataError naming file, row and column if there is one.
    """
    source = tables.read(path, REQUIRED, texts=TEXTS)
    _check_features(path, features, source.columns)
    used = [name for name in source.columns if name in (*REQUIRED, *OPTIONAL, *features)]
    source.refuse_repeated(used)
    return _convert(source, used)


def _check_features(path: str, features: Sequence[str], columns: list[str]) -> None:
    for name in features:
        if name in (*REQUIRED, *OPTIONAL):
            raise DataError(f"data.features names {name!r}, which is used as it is: name other columns only.")
        if name not in columns:
            others = [column for column in columns if column not in (*REQUIRED, *OPTIONAL)]
            available = f"it has {', '.join(others)}" if others else "it has none beside the market's"
            raise DataError(f"data.features names {name!r}, and {path} has no such column: {available}.")


def clean(table: Table) -> tuple[Table, dict[str, int]]:
    """Drops or blanks values that cannot be true, and counts them: the data report.

    A repeated (date, code) keeps its first row; a row without a positive close is dropped; other non-positive prices,
    both ends of an inverted range and any number beyond ABSURD become missing. Jumps are counted and cut out of returns
    by `features`.
    """
    order = np.lexsort((table.codes, table.dates))
    repeated = np.zeros(len(table), dtype=bool)
    dates, codes = table.dates[order], table.codes[order]
    repeated[order[1:]] = (dates[1:] == dates[:-1]) & (codes[1:] == codes[:-1])
    absurd = {name: np.abs(values) > ABSURD for name, values in table.columns.items()}
    columns = {name: np.where(absurd[name], np.nan, values) for name, values in table.columns.items()}
    report = {"rows": len(table), "duplicate_rows": int(repeated.sum())}
    report |= {f"absurd_{name}": int(rows.sum()) for name, rows in absurd.items() if rows.any()}
    for name in (*PRICES, "volume", "adj_close"):
        if name in columns:
            values = columns[name]
            report[f"missing_{name}"] = int(np.isnan(table.columns[name]).sum())
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


def _convert(source: tables.Source, used: list[str]) -> Table:
    codes, code_names = _encode(source, "code")
    sectors, sector_names = np.full(source.table.num_rows, -1, dtype=np.int32), np.array([], dtype=str)
    if "sector" in source.columns:
        sectors, sector_names = _encode(source, "sector", nullable=True)
    return Table(
        source=source.path,
        dates=_dates(source),
        codes=codes,
        code_names=code_names,
        sectors=sectors,
        sector_names=sector_names,
        columns={name: source.floats(name) for name in used if name not in TEXTS},
        unused=tuple(dict.fromkeys(name for name in source.columns if name not in used)),
    )


def _encode(source: tables.Source, name: str, nullable: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns (index per row, names in order); a missing value is -1 where allowed."""
    if not nullable:
        source.refuse_missing(name)
    encoded = source.written(name).combine_chunks().dictionary_encode()
    names = np.array(encoded.dictionary.to_pylist(), dtype=str)
    order = np.argsort(names)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
    return np.where(indices < 0, -1, rank[indices] if len(rank) else -1).astype(np.int32), names[order]


def _dates(source: tables.Source) -> np.ndarray:
    """Returns days [rows] as datetime64[D], from dates, ISO text, YYYYMMDD, or times.

    A time's day is the day on its own clock.
    """
    source.refuse_missing("date")
    column = source.table["date"]
    if pa.types.is_timestamp(column.type):
        column = _clock(source, column)
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        return column.cast(pa.date32(), safe=False).to_numpy()
    encoded = source.written("date").combine_chunks().dictionary_encode()
    days = np.empty(len(encoded.dictionary), dtype="datetime64[D]")
    for i, text in enumerate(encoded.dictionary.to_pylist()):
        try:
            days[i] = datetime.fromisoformat(text).date()
        except ValueError as error:
            row = pc.index(encoded.indices, i).as_py()  # pyright: ignore[reportAttributeAccessIssue]
            raise DataError(f"{source.cell(row, 'date')} is {text[:40]!r}: write dates as 2018-02-07.") from error
    return days[encoded.indices.to_numpy()]


def _clock(source: tables.Source, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns times as on the clock of the column's time zone, if it has one."""
    if column.type.tz is None:
        return column
    try:
        return pc.local_timestamp(column)  # pyright: ignore[reportAttributeAccessIssue]
    except pa.ArrowException as error:
        raise DataError(
            f"{source.path}, column 'date' is in the time zone {column.type.tz!r}, which is not known here: install "
            "the system's tzdata, or store dates without a clock."
        ) from error
