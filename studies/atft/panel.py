"""Prepares a table, real or synthetic, for the model. Torch-free.

All fitted parts (scalers, winsor limits, the universe) are fitted on the training days of the fold.

python -m studies.atft.panel [FILE] [-o data.features=flow]     the data report, without training
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from hpo import load
from hpo.declaration.search_preset import as_new
from hpo.errors import UserError
from hpo.space.config import parse_override
from studies.atft.config import Config, DataConfig
from studies.atft.features import NAMES, Grid, features, forward_returns, to_grid
from studies.atft.graph import Graphs, build_graphs
from studies.atft.market import simulate
from studies.atft.metrics import daily_ic
from studies.atft.split import Split, walk_forward
from studies.atft.table import REQUIRED, Table, clean, read_table
from trainer.errors import DataError

CLIP_SD = 5.0
LEAK_RANK_IC = 0.10  # a feature that ranks real daily returns so well has seen them
JUDGEMENT = (
    f"a RankIC over {LEAK_RANK_IC:.2f} on real daily data is a leak until proven otherwise; val/suspected_leaks counts "
    "the horizons that have one"
)


@dataclass(frozen=True)
class Panel:
    """A prepared panel; its arrays are shared by all trials of a process and cannot be written to.

    x: [days, stocks, features] float32, standardised, 0 where missing; mask: [days, stocks], True for stocks to rank;
    targets: [days, stocks, horizons] float32 of the day's z-scores, returns: raw log returns, both NaN where unknown;
    next_returns: [days, stocks] raw one-day log returns; oracle: like returns, or None for a real panel.
    """

    days: np.ndarray
    codes: np.ndarray
    sectors: np.ndarray
    feature_names: tuple[str, ...]
    x: np.ndarray
    mask: np.ndarray
    targets: np.ndarray
    returns: np.ndarray
    next_returns: np.ndarray
    return_scale: np.ndarray
    graphs: Graphs
    split: Split
    oracle: np.ndarray | None
    report: dict[str, Any]

    @property
    def num_sectors(self) -> int:
        return int(self.sectors.max(initial=-1)) + 1


def check(config: Config) -> dict[str, Any]:
    """Raises DataError for data that no trial could use; returns the data report. Called before a study is written.

    Under train.folds the report is that of the first fold, which trains on the fewest days.
    """
    folds = config.train.folds
    return prepare((config.in_fold(0, folds) if folds > 1 else config).data).report


def prepare(config: DataConfig) -> Panel:
    """Returns the panel of a configuration; kept per process, and made anew when the file changes."""
    return _prepare(config.model_dump_json(), _stamp(config.path))


def _stamp(path: str) -> tuple[int, int]:
    if not path or not Path(path).is_file():
        return (0, 0)
    stat = Path(path).stat()
    return (stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)  # three folds in turn, and one more
def _prepare(text: str, stamp: tuple[int, int]) -> Panel:
    config = DataConfig.model_validate_json(text)
    grid, report, oracle = _load(config)
    split = walk_forward(len(grid.days), config)
    kept, total = _universe(grid, split, config.max_stocks), len(grid.codes)
    grid = _select(grid, kept)
    names, raw = features(grid)
    mask = _rankable(grid, config)
    returns = forward_returns(grid, config.horizons)
    returns[~mask] = np.nan
    _refuse_unusable(returns, split, config, report | {"jumps_over_40_percent": grid.jumps})
    if config.control == "shuffled":
        _shuffle(returns, split.train, config.seed)
    targets = _targets(returns, split.train, config)
    report |= _shape_report(grid, mask, split, names)
    if len(kept) < total:
        report["universe"] = f"the {len(kept)} most traded of {total} stocks; -o data.max_stocks=0 keeps all"
    if leaks := _leaks(grid, returns, split.train, config):
        report["suspected_leaks"] = leaks
    panel = Panel(
        days=grid.days,
        codes=grid.codes,
        sectors=grid.sectors,
        feature_names=names,
        x=_standardise(raw, split.train),
        mask=mask,
        targets=targets,
        returns=returns,
        next_returns=forward_returns(grid, (1,))[..., 0],
        return_scale=np.nanstd(returns[split.train], axis=(0, 1)),
        graphs=build_graphs(grid.returns, raw[..., names.index("size_rank")], grid.sectors, config.graph),
        split=split,
        oracle=None if oracle is None else oracle[:, kept],
        report=report,
    )
    for array in (*vars(panel).values(), *vars(panel.graphs).values()):
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return panel


def _load(config: DataConfig) -> tuple[Grid, dict[str, Any], np.ndarray | None]:
    """Returns the grid, the report so far, and the oracle [days, stocks, horizons] if there is one."""
    if config.path:
        if taken := sorted(set(config.features) & set(NAMES)):
            raise DataError(f"data.features names {taken[0]!r}, a feature that is made already: rename the column.")
        table, report = clean(read_table(config.path, config.features))
        first, last = np.datetime_as_string([table.dates.min(), table.dates.max()])
        about = {"dates": f"{first} to {last}", "judgement": JUDGEMENT} | _columns_report(table)
        return to_grid(table), report | about, None
    market = simulate(config.market, config.seed, config.horizons)
    table, report = clean(market.table)
    grid = to_grid(table)
    if len(grid.days) != config.market.num_days:
        raise AssertionError("a day of the synthetic market has no row at all")
    return grid, report, np.stack([market.oracle[h] for h in config.horizons], axis=-1)


def _refuse_unusable(returns: np.ndarray, split: Split, config: DataConfig, counted: dict[str, Any]) -> None:
    """Raises DataError if too few days have enough stocks whose returns are known and differ."""
    known = np.isfinite(returns)
    low = np.where(known, returns, np.inf).min(axis=1)
    high = np.where(known, returns, -np.inf).max(axis=1)
    usable = ((known.sum(axis=1) >= config.min_stocks) & (high > low)).all(axis=1)
    for part, days, least in (("training", split.train, config.block_days), ("validation", split.val, 1)):
        if (count := int(usable[days].sum())) < least:
            wrong = {label: n for label, n in counted.items() if isinstance(n, int) and n and label != "rows"}
            shown = ", ".join(f"{label.replace('_', ' ')} {n}" for label, n in wrong.items())
            raise DataError(
                f"{config.path or 'the synthetic market'} has {count} {part} days with at least {config.min_stocks} "
                f"stocks whose returns are known and differ, of {len(days)}: lower data.min_stocks, or give more "
                f"stocks or better prices{f' ({shown})' if shown else ''}."
            )


def _columns_report(table: Table) -> dict[str, Any]:
    sector = ["sector"] if len(table.sector_names) else []
    used = [*REQUIRED, *sector, *(name for name in table.columns if name not in REQUIRED)]
    return {"columns_used": used} | ({"columns_unused": list(table.unused)} if table.unused else {})


def _leaks(grid: Grid, returns: np.ndarray, train: np.ndarray, config: DataConfig) -> list[str]:
    """Returns the file's own features that rank the training days' returns better than knowledge of that day can."""
    leaks = []
    for name in config.features:
        by_horizon = {}
        for j, h in enumerate(config.horizons):
            daily = daily_ic(grid.columns[name][train], returns[train, :, j], config.min_stocks)[0]
            by_horizon[h] = float(np.mean(daily[np.isfinite(daily)])) if np.isfinite(daily).any() else 0.0
        h, most = max(by_horizon.items(), key=lambda pair: abs(pair[1]))
        if abs(most) > LEAK_RANK_IC:
            leaks.append(f"{name} (RankIC {most:.2f} with the return over {h} days)")
    return leaks


def _universe(grid: Grid, split: Split, max_stocks: int) -> np.ndarray:
    """Returns the kept stocks, in order: the most traded of the training days, by median dollar volume."""
    seen = grid.observed[split.train]
    dollars = np.where(seen, np.nan_to_num(grid.dollars[split.train]), 0.0)
    if not max_stocks or len(grid.codes) <= max_stocks:
        return np.arange(len(grid.codes))
    return np.sort(np.argsort(-np.median(dollars, axis=0), kind="stable")[:max_stocks])


def _select(grid: Grid, kept: np.ndarray) -> Grid:
    return Grid(
        days=grid.days,
        codes=grid.codes[kept],
        sectors=grid.sectors[kept],
        columns={name: values[:, kept] for name, values in grid.columns.items()},
        dollars=grid.dollars[:, kept],
        returns=grid.returns[:, kept],
        index=grid.index[:, kept],
        jumps=grid.jumps,
    )


def _rankable(grid: Grid, config: DataConfig) -> np.ndarray:
    """Returns [days, stocks]: observed that day and on at least half of the window; none on a thin day.

    A day is thin with fewer than min_stocks stocks, or half of the median of the last 20 days.
    """
    seen = grid.observed
    history = np.cumsum(seen, axis=0)
    history[config.lookback :] = history[config.lookback :] - history[: -config.lookback]
    mask = seen & (history >= (config.lookback + 1) // 2)
    count = seen.sum(axis=1)
    usual = np.array([np.median(count[max(0, t - 19) : t + 1]) for t in range(len(count))])
    thin = (mask.sum(axis=1) < config.min_stocks) | (count < usual / 2)
    return mask & ~thin[:, None]


def _standardise(raw: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Clips to the training span's 0.5 and 99.5 % quantiles and scales by its mean and deviation; 0 where missing."""
    span = raw[train].reshape(-1, raw.shape[-1])
    span = np.where(np.isfinite(span).any(axis=0), span, np.float32(0))
    low, high = np.nanquantile(span, [0.005, 0.995], axis=0)
    span = np.clip(span, low, high)
    scale = np.nanstd(span, axis=0)
    x = (np.clip(raw, low, high) - np.nanmean(span, axis=0)) / np.where(scale > 1e-9, scale, 1.0)
    return np.nan_to_num(np.clip(x, -CLIP_SD, CLIP_SD)).astype(np.float32)


def _targets(returns: np.ndarray, train: np.ndarray, config: DataConfig) -> np.ndarray:
    """Returns per-day z-scores (or normal scores of the ranks) of the winsorised returns.

    The limits are those of the training days.
    """
    low, high = np.nanquantile(returns[train], [config.winsor, 1 - config.winsor], axis=(0, 1))
    clipped = np.clip(returns, low, high)
    if config.target == "rank_normal":
        count = np.isfinite(clipped).sum(axis=1, keepdims=True)
        clipped = ndtri((rankdata(clipped, axis=1, nan_policy="omit") - 0.5) / np.maximum(count, 1))
    count = np.maximum(np.isfinite(clipped).sum(axis=1, keepdims=True), 1)
    centred = clipped - np.nansum(clipped, axis=1, keepdims=True) / count
    scale = np.sqrt(np.nansum(centred**2, axis=1, keepdims=True) / count)
    return (centred / np.where(scale > 1e-12, scale, 1.0)).astype(np.float32)


def _shuffle(returns: np.ndarray, train: np.ndarray, seed: int) -> None:
    """Permutes the stocks' returns within each training day, in place: every loss term is then a negative control."""
    rng = np.random.default_rng([seed, 0x5F])
    for day in train:
        known = np.isfinite(returns[day]).all(axis=1)
        returns[day, known] = rng.permutation(returns[day, known])
        returns[day, ~known] = np.nan


def _shape_report(grid: Grid, mask: np.ndarray, split: Split, names: tuple[str, ...]) -> dict[str, int]:
    full = np.asarray(mask.any(axis=1))
    return {
        "days": len(grid.days),
        "stocks": len(grid.codes),
        "features": len(names),
        "jumps_over_40_percent": grid.jumps,
        "unknown_sector": int((grid.sectors < 0).sum()),
        "thin_days": int((~full[split.train[0] :]).sum()),
        "train_days": int(full[split.train].sum()),
        "val_days": int(full[split.val].sum()),
        "test_days": int(full[split.test].sum()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.atft.panel", description="The data report.")
    parser.add_argument("path", nargs="?", default="", metavar="FILE", help="a panel; without it the synthetic market")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args(arguments)
    try:
        overrides = dict(map(parse_override, options.overrides))
        config = as_new(load("atft"), {"data.path": options.path, **overrides}).config
        assert isinstance(config, Config)
        print(json.dumps(check(config), indent=2))
    except (UserError, DataError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
