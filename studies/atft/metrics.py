"""Computes the metric block of a ranking: pure functions of arrays, float64, torch-free.

Returns are raw log returns. A day is evaluated if at least `min_stocks` stocks are masked in with a finite return and
the returns differ. On an evaluated day whose predictions are constant or missing the metrics are undefined (NaN):
neither 0 nor left out of the count.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

TRADING_DAYS = 252


def daily_ic(
    predictions: np.ndarray, returns: np.ndarray, min_stocks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (RankIC per day, IC per day, evaluated per day).

    These are Spearman's correlation with average ranks, and Pearson's. predictions, returns: [days, stocks], NaN where
    missing.
    """
    days = len(predictions)
    rank_ic, ic, evaluated = np.full(days, np.nan), np.full(days, np.nan), np.zeros(days, dtype=bool)
    for t in range(days):
        known = np.isfinite(returns[t])
        evaluated[t] = known.sum() >= min_stocks and np.ptp(returns[t, known]) > 0
        usable = known & np.isfinite(predictions[t])
        if evaluated[t] and usable.sum() >= min_stocks:
            p, r = predictions[t, usable].astype(np.float64), returns[t, usable].astype(np.float64)
            # Constant at the precision of float32, in which predictions are made.
            if np.ptp(p) > 1e-6 * np.abs(p).max():
                ic[t], rank_ic[t] = _correlation(p, r), _correlation(rankdata(p), rankdata(r))
    return rank_ic, ic, evaluated


def newey_west_t(values: np.ndarray, lag: int) -> float:
    """Returns t of the mean, robust to autocorrelation up to `lag` (Newey and West, 1987; Bartlett weights)."""
    n = len(values)
    if n < 2:
        return float("nan")
    d = values - values.mean()
    lag = min(lag, n - 1)
    variance = d @ d / n + 2 * sum((1 - k / (lag + 1)) * (d[k:] @ d[:-k]) / n for k in range(1, lag + 1))
    return float(values.mean() / np.sqrt(variance / n)) if variance > 0 else float("nan")


def weights(predictions: np.ndarray) -> np.ndarray:
    """Returns dollar-neutral weights of gross 1 per day, [days, stocks].

    They are all 0 on a day of constant or missing predictions.
    """
    count = np.isfinite(predictions).sum(axis=1, keepdims=True)
    mean = np.nansum(predictions, axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.nan_to_num(predictions - mean)
    centred[np.abs(centred) <= 1e-12 * (1 + np.abs(mean))] = 0.0
    gross = np.abs(centred).sum(axis=1, keepdims=True)
    return np.divide(centred, gross, out=np.zeros_like(centred), where=gross > 0)


def portfolio(predictions: np.ndarray, next_returns: np.ndarray, horizon: int, cost: float) -> dict[str, float]:
    """Returns Sharpe ratios (annual), turnover and drawdown of holding each day's weights for `horizon` days.

    1/horizon of the book is renewed each day, so daily returns do not overlap (Jegadeesh and Titman, 1993); a missing
    return earns 0. Turnover is the daily sum of absolute changes; `cost` is paid per unit of it.
    """
    w = weights(predictions)
    book = np.stack([w[max(0, t - horizon + 1) : t + 1].sum(axis=0) / horizon for t in range(len(w))])
    gross = (book * np.nan_to_num(np.expm1(next_returns))).sum(axis=1)
    turnover = np.abs(np.diff(book, axis=0, prepend=0.0)).sum(axis=1)
    wealth = np.cumsum(gross - cost * turnover)
    peak = np.maximum.accumulate(np.maximum(wealth, 0.0))
    return {
        "sharpe": _sharpe(gross),
        "sharpe_net": _sharpe(gross - cost * turnover),
        "turnover": float(turnover.mean()),
        "max_drawdown": float((peak - wealth).max()),
    }


def decile_spread(predictions: np.ndarray, returns: np.ndarray) -> float:
    """Returns the mean over days of the mean return of the highest tenth of predictions minus that of the lowest."""
    spreads = []
    for p, r in zip(predictions, returns, strict=True):
        usable = np.flatnonzero(np.isfinite(p) & np.isfinite(r))
        tenth = len(usable) // 10
        if tenth:
            order = usable[np.argsort(p[usable], kind="stable")]
            spreads.append(r[order[-tenth:]].mean() - r[order[:tenth]].mean())
    return float(np.mean(spreads)) if spreads else float("nan")


def metric_block(
    predictions: np.ndarray,
    returns: np.ndarray,
    next_returns: np.ndarray,
    horizon: int,
    *,
    min_stocks: int,
    max_undefined: float,
    cost: float,
) -> dict[str, float]:
    """Returns all metrics of one horizon.

    Correlations are NaN once more than `max_undefined` of the days are undefined.
    """
    rank_ic, ic, evaluated = daily_ic(predictions, returns, min_stocks)
    undefined = evaluated & ~np.isfinite(rank_ic)
    kept = evaluated & ~undefined
    scored = rank_ic[kept]
    failed = not len(scored) or undefined.sum() > max_undefined * evaluated.sum()
    if failed:
        scored = np.full(1, np.nan)
    deviation = float(scored.std(ddof=1)) if len(scored) > 1 else float("nan")
    mean = float(scored.mean())
    return {
        "rank_ic": mean,
        "rank_ic_sd": deviation,
        "icir": mean / deviation if deviation > 0 else float("nan"),
        "rank_ic_positive": float("nan") if failed else float((scored > 0).mean()),
        "rank_ic_t": newey_west_t(scored, horizon - 1),
        "ic": float("nan") if failed else float(ic[kept].mean()),
        "decile_spread": float("nan") if failed else decile_spread(predictions[kept], returns[kept]),
        "num_days": float(evaluated.sum()),
        "undefined_days": float(undefined.sum()),
    } | {k: float("nan") if failed else v for k, v in portfolio(predictions, next_returns, horizon, cost).items()}


def oracle_rank_ic(oracle: np.ndarray, returns: np.ndarray, min_stocks: int) -> float:
    """Returns the mean RankIC of the known conditional mean: the ceiling on these days and stocks."""
    return float(np.nanmean(daily_ic(oracle, returns, min_stocks)[0]))


def _correlation(p: np.ndarray, r: np.ndarray) -> float:
    p, r = p - p.mean(), r - r.mean()
    scale = np.sqrt((p @ p) * (r @ r))
    return float(p @ r / scale) if scale > 0 else float("nan")


def _sharpe(daily: np.ndarray) -> float:
    deviation = daily.std(ddof=1) if len(daily) > 1 else 0.0
    return float(daily.mean() / deviation * np.sqrt(TRADING_DAYS)) if deviation > 0 else float("nan")
