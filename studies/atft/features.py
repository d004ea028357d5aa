"""Computes features and targets of a panel [days, stocks]. Every feature of day t reads only days up to t."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from studies.atft.table import JUMP, PRICES, Table

NAMES = (
    *("return_1", "return_5", "return_10", "return_20", "excess_1", "sector_1", "gap", "intraday", "range"),
    *("close_location", "volatility_20", "volatility_ratio", "volume_1", "volume_20", "size_rank", "drawdown_20"),
    *("mean_gap_20", "market_1"),
)


@dataclass(frozen=True)
class Grid:
    """A table on its grid: every array is [days, stocks], NaN where a row is missing.

    Prices in `columns` are adjusted if the table has `adj_close`. `dollars`, the money traded, never is: adjusted
    prices are divided by later splits and dividends, so their level knows the future.
    """

    days: np.ndarray
    codes: np.ndarray
    sectors: np.ndarray
    columns: dict[str, np.ndarray]
    dollars: np.ndarray
    returns: np.ndarray
    index: np.ndarray
    jumps: int

    @property
    def observed(self) -> np.ndarray:
        return np.isfinite(self.columns["close"])


def to_grid(table: Table) -> Grid:
    """Spreads a cleaned table over days x stocks.

    `returns` are log returns since the stock's last row, NaN on its first row, without a row, and where the price jumps
    by more than 40 %, unless adjusted prices show that it is not a split: a split is far more likely than news. `index`
    is their running sum, so that a return over k days is a difference.
    """
    days, row_day = np.unique(table.dates, return_inverse=True)
    shape = (len(days), len(table.code_names))
    columns = {}
    for name, values in table.columns.items():
        columns[name] = np.full(shape, np.nan)
        columns[name][row_day, table.codes] = values
    dollars = columns["volume"] * columns["close"]
    adjusted = "adj_close" in columns
    if adjusted:
        ratio = columns.pop("adj_close") / columns["close"]
        for name in PRICES:
            columns[name] = columns[name] * ratio
    sectors = np.full(shape[1], -1, dtype=np.int64)
    known = table.sectors >= 0
    sectors[table.codes[known][::-1]] = table.sectors[known][::-1]
    log_close = np.log(columns["close"])
    returns = log_close - _last_seen(log_close)
    jump = np.abs(np.expm1(returns)) > JUMP
    if not adjusted:
        returns = np.where(jump, np.nan, returns)
    index = np.cumsum(np.nan_to_num(returns), axis=0)
    return Grid(days, table.code_names, sectors, columns, dollars, returns, index, int(jump.sum()))


def features(grid: Grid) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns (names, values [days, stocks, features] float32, NaN missing): NAMES, then the table's own columns."""
    c, r = grid.columns, grid.returns
    log = {name: np.log(c[name]) for name in PRICES}
    clean_since = _clean_since(grid)
    volume = np.log1p(c["volume"])
    dollars = np.log1p(grid.dollars)
    vol_20, vol_5 = _rolling_std(r, 20), _rolling_std(r, 5)
    market = _row_mean(r)
    span = c["high"] - c["low"]
    out = {f"return_{k}": _k_day(grid, k, clean_since) for k in (1, 5, 10, 20)}
    out["excess_1"] = r - market
    out["sector_1"] = r - _sector_mean(r, grid.sectors)
    out["gap"] = r - (log["close"] - log["open"])
    out["intraday"] = log["close"] - log["open"]
    out["range"] = log["high"] - log["low"]
    out["close_location"] = (
        np.divide(c["close"] - c["low"], span, out=np.full(span.shape, np.nan), where=span > 0) - 0.5
    )
    out["volatility_20"] = np.log(np.maximum(vol_20, 1e-6))
    out["volatility_ratio"] = np.log(np.maximum(vol_5, 1e-6)) - out["volatility_20"]
    out["volume_1"] = volume - _last_seen(volume)
    out["volume_20"] = volume - _rolling_mean(volume, 20)
    out["size_rank"] = _row_rank(_rolling_mean(dollars, 20))
    level = np.where(np.isfinite(r), grid.index, np.nan)
    out["drawdown_20"] = grid.index - _rolling_max(level, 20)
    out["mean_gap_20"] = grid.index - _rolling_mean(level, 20)
    out["market_1"] = np.broadcast_to(market, r.shape)
    extra = sorted(name for name in c if name not in (*PRICES, "volume"))
    out = {name: out[name] for name in NAMES} | {name: c[name] for name in extra}
    values = np.stack(list(out.values()), axis=-1)
    values[~grid.observed] = np.nan
    return tuple(out), np.where(np.isfinite(values), values, np.nan).astype(np.float32)


def forward_returns(grid: Grid, horizons: tuple[int, ...]) -> np.ndarray:
    """Returns log returns from the close of day t to that of day t + h, [days, stocks, horizons].

    NaN without a row on either day, or with a jump in between.
    """
    clean_since = _clean_since(grid)
    out = np.full((*grid.returns.shape, len(horizons)), np.nan)
    for j, h in enumerate(horizons):
        out[:-h, :, j] = _k_day(grid, h, clean_since)[h:]
    return out


def _k_day(grid: Grid, k: int, clean_since: np.ndarray) -> np.ndarray:
    """Returns the return over the last k days; NaN unless both ends are observed and nothing in between is cut out."""
    out = np.full(grid.returns.shape, np.nan)
    out[k:] = grid.index[k:] - grid.index[:-k]
    start = np.arange(len(grid.days))[:, None] - k
    seen = grid.observed
    both = np.zeros_like(seen)
    both[k:] = seen[k:] & seen[:-k]
    return np.where(both & (clean_since <= start), out, np.nan)


def _clean_since(grid: Grid) -> np.ndarray:
    """Returns for each day the last day that began a new price history: a first row or a jump."""
    cut = grid.observed & ~np.isfinite(grid.returns)
    day = np.arange(len(grid.days))[:, None]
    return np.maximum.accumulate(np.where(cut, day, -1), axis=0)


def _last_seen(values: np.ndarray) -> np.ndarray:
    """Returns for each day the last value before it that is not NaN."""
    rows = np.where(np.isfinite(values), np.arange(len(values))[:, None], -1)
    last = np.maximum.accumulate(rows, axis=0)
    last = np.concatenate([np.full((1, values.shape[1]), -1), last[:-1]])
    return np.where(last >= 0, np.take_along_axis(values, np.maximum(last, 0), axis=0), np.nan)


def _rolling_sum(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (sum, count) of the values other than NaN among the last `window` days."""
    total = np.cumsum(np.nan_to_num(values), axis=0)
    count = np.cumsum(np.isfinite(values), axis=0)
    for running in (total, count):
        running[window:] = running[window:] - running[:-window].copy()
    return total, count


def _rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    total, count = _rolling_sum(values, window)
    return np.where(count >= (window + 1) // 2, total / np.maximum(count, 1), np.nan)


def _rolling_std(values: np.ndarray, window: int) -> np.ndarray:
    mean, square = _rolling_mean(values, window), _rolling_mean(values**2, window)
    return np.sqrt(np.maximum(square - mean**2, 0.0))


def _rolling_max(values: np.ndarray, window: int) -> np.ndarray:
    filled = np.where(np.isfinite(values), values, -np.inf)
    padded = np.concatenate([np.full((window - 1, values.shape[1]), -np.inf), filled])
    top = np.lib.stride_tricks.sliding_window_view(padded, window, axis=0).max(axis=-1)
    return np.where(np.isfinite(top), top, np.nan)


def _row_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over the stocks of each day, [days, 1]."""
    count = np.isfinite(values).sum(axis=1, keepdims=True)
    return np.where(count > 0, np.nansum(values, axis=1, keepdims=True) / np.maximum(count, 1), np.nan)


def _sector_mean(values: np.ndarray, sectors: np.ndarray) -> np.ndarray:
    """Returns the mean over the stocks of the same sector, unknown sectors together."""
    out = np.empty_like(values)
    for sector in np.unique(sectors):
        members = sectors == sector
        out[:, members] = _row_mean(values[:, members])
    return out


def _row_rank(values: np.ndarray) -> np.ndarray:
    """Returns the rank within the day scaled to [-0.5, 0.5], NaN kept."""
    order = np.argsort(np.argsort(np.where(np.isfinite(values), values, np.inf), axis=1, kind="stable"), axis=1)
    count = np.isfinite(values).sum(axis=1, keepdims=True)
    return np.where(np.isfinite(values), order / np.maximum(count - 1, 1) - 0.5, np.nan)
