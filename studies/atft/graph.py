"""Builds the day's graph over the stocks, from returns up to that day alone. Torch-free.

A panel covers one market, so an edge has `size_gap` in place of a feature for a shared market.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from studies.atft.config import GraphConfig

EDGE_FEATURES = ("correlation", "same_sector", "size_gap", "self")
SIZE_STEPS = 5  # size_gap counts fifths of the day's ranking


@dataclass(frozen=True)
class Graphs:
    """Neighbour lists: `neighbours[g, i]` are the sources of stock i in graph g, itself first, padded with itself.

    neighbours: [graphs, stocks, 1 + top_k] int; valid: the same shape, bool; edges: [..., len(EDGE_FEATURES)];
    of_day: [days] int, the graph in force on a day.
    """

    neighbours: np.ndarray
    valid: np.ndarray
    edges: np.ndarray
    of_day: np.ndarray


def build_graphs(returns: np.ndarray, size: np.ndarray, sectors: np.ndarray, config: GraphConfig) -> Graphs:
    """Returns one graph every `refresh` days. returns, size (a stock's turnover rank): [days, stocks], NaN missing.

    The market's mean is subtracted on each day first: raw correlations of stocks all exceed any useful threshold. An
    edge also has how much larger the source is: large stocks lead small ones (Lo and MacKinlay, 1990).
    """
    days, stocks = returns.shape
    count = np.isfinite(returns).sum(axis=1, keepdims=True)
    excess = returns - np.nansum(returns, axis=1, keepdims=True) / np.maximum(count, 1)
    starts = np.arange(0, days, config.refresh)
    top = min(config.top_k, stocks - 1)
    neighbours = np.empty((len(starts), stocks, 1 + top), dtype=np.int64)
    rho = np.empty(neighbours.shape)
    for g, day in enumerate(starts):
        matrix = _correlation(excess[max(0, day - config.window + 1) : day + 1], config.min_observations)
        strength = np.where(np.abs(matrix) >= config.min_correlation, np.abs(matrix), 0.0)
        np.fill_diagonal(strength, 2.0)
        neighbours[g] = np.argsort(-strength, axis=1, kind="stable")[:, : 1 + top]
        rho[g] = np.where(np.take_along_axis(strength, neighbours[g], axis=1) > 0,
                          np.take_along_axis(matrix, neighbours[g], axis=1), np.nan)  # fmt: skip
    itself = np.arange(stocks)[None, :, None]
    rho[..., 0] = 1.0
    valid = np.isfinite(rho)
    neighbours = np.where(valid, neighbours, itself)
    same = (sectors[neighbours] == sectors[itself]) & (sectors[itself] >= 0)
    gap = np.take_along_axis(size[starts], neighbours.reshape(len(starts), -1), axis=1).reshape(neighbours.shape)
    gap = SIZE_STEPS * (gap - size[starts][..., None])
    edges = np.stack([np.nan_to_num(v) for v in (rho, same, gap, neighbours == itself)], axis=-1).astype(np.float32)
    return Graphs(neighbours, valid, edges, np.arange(days) // config.refresh)


def _correlation(x: np.ndarray, min_observations: int) -> np.ndarray:
    """Returns the correlation of the columns of x [days, stocks] over their common days; 0 where those are too few."""
    seen = np.isfinite(x).astype(float)
    x = np.nan_to_num(x)
    n = seen.T @ seen
    mean_i = (x.T @ seen) / np.maximum(n, 1)
    square_i = (x.T**2 @ seen) / np.maximum(n, 1)
    covariance = (x.T @ x) / np.maximum(n, 1) - mean_i * mean_i.T
    variance = np.maximum(square_i - mean_i**2, 0.0)
    scale = np.sqrt(variance * variance.T)
    enough = (n >= min_observations) & (scale > 1e-12)
    return np.divide(covariance, scale, out=np.zeros_like(scale), where=enough)
