"""Fits a Gaussian process whose function drifts with time, and finds its highest upper confidence bound (Bogunovic
et al. 2016, "Time-Varying Gaussian Process Bandit Optimization"; Parker-Holder et al. 2020, "Provably Efficient Online
Hyperparameter Optimization with Population-Based Bandits", section 4).

Points lie in the unit cube, times count generations, and values are standardised. All arrays are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

Array = NDArray[np.float64]
Function = Callable[[Array], Array]  # points `[m, d]` -> values `[m]`
Bounds = Sequence[tuple[float, float]]

C1, C2 = 0.2, 0.4  # constants of the bound's width
CANDIDATES = 1000
# Bounds and starting points of the search for variance, lengthscale, omega and noise.
_BOUNDS = [(0.05, 20.0), (0.05, 5.0), (1e-4, 0.9), (1e-4, 1.0)]
_STARTS = [(1.0, 0.3, 0.05, 0.1), (1.0, 1.0, 0.3, 0.1)]
_HALVINGS = 6  # how often a step is halved
_ALIKE = 9  # decimal places to which values are compared


@dataclass(frozen=True)
class Kernel:
    """The kernel k((x, t), (y, s)) = variance exp(-|x - y|^2 / (2 lengthscale^2)) (1 - omega)^(|t - s| / 2)."""

    variance: float = 1.0
    lengthscale: float = 1.0
    omega: float = 0.0

    def __call__(self, x: Array, t: Array, y: Array, s: Array) -> Array:
        """Returns `[n, m]`, the kernel between `x: [n, d]` at times `t: [n]` and `y: [m, d]` at times `s: [m]`."""
        near = np.exp(-0.5 * cdist(x, y, "sqeuclidean") / self.lengthscale**2)
        return self.variance * near * (1.0 - self.omega) ** (np.abs(t[:, None] - s[None, :]) / 2)


class Process:
    """The posterior given values `y: [n]` at points `x: [n, d]` and times `t: [n]`; n may be 0."""

    def __init__(self, x: Array, t: Array, y: Array, kernel: Kernel, noise: float) -> None:
        self.x, self.t, self.kernel, self.noise = x, t, kernel, noise
        gram = kernel(x, t, x, t) + noise * np.eye(len(x))
        self._factor = cho_factor(gram, lower=True) if len(x) else None
        self._weights = cho_solve(self._factor, y) if self._factor else y

    def at(self, x: Array, t: float) -> tuple[Array, Array]:
        """Returns mean and standard deviation, `[m]` each, at `x: [m, d]` and time `t`."""
        if self._factor is None:
            return np.zeros(len(x)), np.full(len(x), math.sqrt(self.kernel.variance))
        cross = self.kernel(self.x, self.t, x, np.full(len(x), t))
        explained = np.einsum("nm,nm->m", cross, cho_solve(self._factor, cross))
        return cross.T @ self._weights, np.sqrt(np.maximum(self.kernel.variance - explained, 1e-12))

    def and_pending(self, x: Array, t: float) -> Process:
        """Returns the process given that values at `x: [m, d]` and time `t` are pending: its deviation is smaller there
        (Desautels et al. 2014)."""
        points, times = np.concatenate([self.x, x]), np.concatenate([self.t, np.full(len(x), t)])
        return Process(points, times, np.zeros(len(points)), self.kernel, self.noise)


def by_comparisons(function: Function, start: Array, bounds: Bounds, step: float) -> tuple[Array, float]:
    """Returns the lowest point that compass search reaches from `start: [d]`, and the value there (Kolda, Lewis and
    Torczon 2003, "Optimization by Direct Search", SIAM Review 45:3).

    The search moves to the best point one step away along an axis, and halves the step if none is better. All points
    lie on a lattice around `start`, and values are only compared, so their last bits, which differ between processors,
    do not change the result.
    """
    low, high = np.array(bounds).T
    axes = np.concatenate([np.eye(len(start)), -np.eye(len(start))])
    lowest, value, least = start, float(function(start[None, :])[0]), step / 2**_HALVINGS
    while step >= least:
        around = np.clip(lowest + step * axes, low, high)
        values = function(around)
        lowest_index = int(np.argmin(values.round(_ALIKE)))
        if values[lowest_index] < value - 10.0**-_ALIKE:
            lowest, value = around[lowest_index], float(values[lowest_index])
        else:
            step /= 2
    return lowest, value


def by_gradients(function: Function, start: Array, bounds: Bounds, step: float) -> tuple[Array, float]:
    """Returns the lowest point that L-BFGS-B reaches from `start: [d]`, and the value there; depends on last bits."""
    optimum = minimize(lambda x: float(function(x[None, :])[0]), start, method="L-BFGS-B", bounds=bounds)
    return optimum.x, float(optimum.fun)


Search = Callable[[Function, Array, Bounds, float], tuple[Array, float]]


def fit(x: Array, t: Array, y: Array, search: Search = by_comparisons) -> Process:
    """Returns the process with the most likely variance, lengthscale, omega and noise. Standardises `y`."""
    if len(y) < 2:
        return Process(x, t, np.zeros(len(y)), Kernel(), 0.1)
    y = (y - y.mean()) / (y.std() or 1.0)

    def unlikelihood(logs: Array) -> float:
        variance, lengthscale, omega, noise = np.exp(logs)
        gram = Kernel(variance, lengthscale, omega)(x, t, x, t) + noise * np.eye(len(x))
        factor = cho_factor(gram, lower=True)
        return float(0.5 * y @ cho_solve(factor, y) + np.log(np.diag(factor[0])).sum())

    def of_each(points: Array) -> Array:
        return np.array([unlikelihood(logs) for logs in points])

    bounds = [(math.log(low), math.log(high)) for low, high in _BOUNDS]
    ends = [search(of_each, np.log(start), bounds, 1.0) for start in _STARTS]
    variance, lengthscale, omega, noise = np.exp(min(ends, key=itemgetter(1))[0])
    return Process(x, t, y, Kernel(variance, lengthscale, omega), noise)


def width(n: int) -> float:
    """Returns sqrt(beta) with beta = c1 + log(c2 n) for n observations; never below sqrt(c1)."""
    return math.sqrt(C1 + max(0.0, math.log(C2 * max(n, 1))))


def suggest(process: Process, pending: Array, t: float, draws: Array, search: Search = by_comparisons) -> Array:
    """Returns `[d]`, the point of the highest bound at time `t` while the points `pending: [m, d]` are being tried.

    The search starts at the best of the uniform `draws: [n, d]`. Returns the first draw if there are no observations.
    """
    if not len(process.t):
        return draws[0]
    around, beta = process.and_pending(pending, t), width(len(process.t))

    def bound(x: Array) -> Array:
        return process.at(x, t)[0] + beta * around.at(x, t)[1]

    best = draws[int(np.argmax(bound(draws)))]
    end, value = search(lambda x: -bound(x), best, [(0.0, 1.0)] * len(best), 0.1)
    return np.clip(end if value <= -float(bound(best[None, :])[0]) else best, 0.0, 1.0)
