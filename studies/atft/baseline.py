"""Computes the linear reference: ridge on the features of the day, next to the oracle. Torch-free.

python -m studies.atft.baseline [SEEDS]     mean over synthetic markets of that many seeds
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from studies.atft.config import DataConfig
from studies.atft.metrics import daily_ic, oracle_rank_ic
from studies.atft.panel import Panel, prepare

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)


def ridge_predictions(panel: Panel, horizon: int, days: np.ndarray, min_stocks: int) -> np.ndarray:
    """Returns predictions [days, stocks], NaN where not ranked, of the horizon with index `horizon`.

    Fitted on the training days; the penalty (per row) is the best on the last fifth of them, purged by 20 days.
    """
    train = panel.split.train
    cut = len(train) * 4 // 5
    early, late = train[: max(1, cut - 20)], train[cut:]
    scores = []
    for penalty in PENALTIES:
        guess = _predict(panel, _fit(panel, horizon, early, penalty), late)
        scores.append(np.nanmean(daily_ic(guess, panel.returns[late, :, horizon], min_stocks)[0]))
    return _predict(panel, _fit(panel, horizon, train, PENALTIES[int(np.argmax(scores))]), days)


def _fit(panel: Panel, horizon: int, days: np.ndarray, penalty: float) -> np.ndarray:
    y = panel.targets[days, :, horizon]
    known = np.isfinite(y)
    x, y = panel.x[days][known].astype(float), y[known].astype(float)
    return np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(x.shape[1]), x.T @ y)


def _predict(panel: Panel, coefficients: np.ndarray, days: np.ndarray) -> np.ndarray:
    return np.where(panel.mask[days], panel.x[days] @ coefficients, np.nan)


def rank_ics(seeds: int, horizons: int) -> np.ndarray:
    """Returns [horizons, 2]: the RankIC of ridge and of the oracle on the validation days, for the first `horizons`.

    They are means over synthetic markets.
    """
    rows = []
    for seed in range(seeds):
        config = DataConfig(seed=seed)
        panel = prepare(config)
        days = panel.split.val
        for j in range(horizons):
            guess = ridge_predictions(panel, j, days, config.min_stocks)
            ridge = np.nanmean(daily_ic(guess, panel.returns[days, :, j], config.min_stocks)[0])
            assert panel.oracle is not None
            ceiling = oracle_rank_ic(panel.oracle[days, :, j], panel.returns[days, :, j], config.min_stocks)
            rows.append((ridge, ceiling))
    return np.array(rows).reshape(seeds, horizons, 2).mean(axis=0)


def positive(text: str) -> int:
    """Parses a whole number from 1 on, for argparse."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0: give 1 or more.")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.atft.baseline", description="Ridge beside the oracle.")
    parser.add_argument("seeds", nargs="?", type=positive, default=10, metavar="SEEDS", help="synthetic markets")
    seeds: int = parser.parse_args(arguments).seeds
    horizons = DataConfig().horizons
    table = rank_ics(seeds, len(horizons))
    print(f"mean RankIC on the validation days of {seeds} markets")
    for h, (ridge, ceiling) in zip(horizons, table, strict=True):
        print(f"h={h:<3d} ridge {ridge:.4f}  oracle {ceiling:.4f}  ratio {ridge / ceiling:.2f}")


if __name__ == "__main__":
    main()
