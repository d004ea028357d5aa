"""Models learning curves and configurations by a Gaussian process, to predict how trials will end.

With x a configuration's features and i a trial, the best loss up to an epoch, warped, is a power law of the epoch
(Kadra et al. 2023, "Scaling Laws for Hyperparameter Optimization"; there by an ensemble of networks):

    y_i(epoch) = a_i + b_i epoch^-c + noise,    a_i = a + f(x_i) + g_i,    b_i = b + F(x_i) + G_i

f and F have a Matern 5/2 kernel with a length scale for each feature: they predict from a configuration where its curve
ends and how far it still falls. g_i and G_i are normal and specific to a trial. The model is linear in all of them and
c is common to all trials, so the posterior is that of a Gaussian process in closed form, as in freeze-thaw (Swersky et
al. 2014), whose decays are exponential. It is computed by torch alone, in float64 and one thread, so it is a function
of its data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor

from hpo.search.promotion.base import Point

Seen = tuple[tuple[int, float], ...]  # (epoch, loss), ascending

MOST = 600  # observations that the model takes in; the time of a decision grows with their cube
_FIRST, _TIMES = 4, 3  # the model observes a curve at the epochs _FIRST * _TIMES ** k
_FITTED = 48  # observations of one epoch that the length scales are fitted to, at most
_STEPS = 25

# torch has no types of these.
_cholesky = cast("Callable[[Tensor], Tensor]", torch.linalg.cholesky)  # pyright: ignore[reportUnknownMemberType]
_solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
_ndtr = cast("Callable[[Tensor], Tensor]", torch.special.ndtr)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True)
class Trials:
    """Observed trials: their features, each in [0, 1], and the points seen of their curves. Plain and hashable."""

    points: tuple[Point, ...]
    seen: tuple[Seen, ...]

    @property
    def best(self) -> float:
        return min(curve[-1][1] for curve in self.seen)


def observe(
    points: Mapping[int, Point],
    curves: Mapping[int, Sequence[tuple[int, float]]],
    growing: Collection[int] = (),
    by_best: bool = False,
) -> tuple[list[int], Trials]:
    """Returns the numbers of the trials that have features and a finite loss, and the observed points of their curves.

    A curve is observed at the epochs 4, 12, 36 ..., and at its end unless it is still `growing`. Earlier points say
    little about the end and mislead the model (docs/log.md), and a model with the newest epoch of every running trial
    would have to be fitted again each time. A trial that ends on a loss that is not finite counts as the worst of all,
    no earlier than the other trials' points.

    by_best  whether a point is the least loss so far, for studies that judge a trial by it, instead of the loss there
    """
    ended_curves = [curve for number, curve in curves.items() if number not in growing and curve]
    worst = max((loss for curve in ended_curves for _, loss in curve if math.isfinite(loss)), default=math.nan)
    first = min(_FIRST, max((curve[-1][0] for curve in ended_curves), default=_FIRST))
    thin = partial(_thinned, worst=(first, worst), by_best=by_best)
    known = {n: thin(curves[n], ended=n not in growing) for n in sorted(points) if curves.get(n)}
    numbers = [number for number, seen in known.items() if seen and math.isfinite(worst)]
    return numbers, Trials(tuple(points[n] for n in numbers), tuple(known[n] for n in numbers))


def _thinned(curve: Sequence[tuple[int, float]], worst: tuple[int, float], ended: bool, by_best: bool) -> Seen:
    least, mark = math.inf, _FIRST
    points: list[tuple[int, float]] = []
    for index, (epoch, loss) in enumerate(curve):
        finite, end = math.isfinite(loss), ended and index == len(curve) - 1
        least = min(least, loss) if finite else least
        if end or (epoch >= mark and finite):
            point = (epoch, least if by_best else loss) if finite else (max(epoch, worst[0]), worst[1])
            points.append((max(point[0], 1), point[1]))
        while epoch >= mark:
            mark *= _TIMES
    return tuple(points)


@dataclass(frozen=True)
class _Table:
    """Observations: x [n, d], t [n] the logarithm of the epoch, y [n], i [n] the trial's index."""

    x: Tensor
    t: Tensor
    i: Tensor
    y: Tensor


def _unseen(points: Sequence[Point], indices: Sequence[int], epoch: int) -> _Table:
    """Returns a table of these trials at an epoch, without losses."""
    x = torch.tensor(points, dtype=torch.float64)
    t = torch.full((len(x),), math.log(epoch), dtype=torch.float64)
    return _Table(x, t, torch.tensor(indices), torch.empty(0, dtype=torch.float64))


class Model:
    """The posterior given the trials. `Model.of` returns an earlier model of the same trials if it is cached."""

    def __init__(self, trials: Trials) -> None:
        with one_thread():
            self._trials, self._warp = trials, _Warp(trials)
            table = _table(trials, self._warp, _all(trials))
            self._theta = _fitted(*_few(trials, self._warp))
            kernel = _kernel(self._theta, table, table, same=True)
            self._factor = _cholesky(kernel)
            self._weights = torch.cholesky_solve(table.y[:, None], self._factor)[:, 0]
            self._table = table
            self._leaders: dict[int, float] = {}

    @staticmethod
    @lru_cache(maxsize=4)
    def of(trials: Trials) -> Model:
        return Model(trials)

    def improvement(self, points: Sequence[Point], indices: Sequence[int], epoch: int, most: int = 96) -> list[float]:
        """Returns the trials' expected improvement on `leader(epoch)` at `epoch`, on the warped scale.

        points   the trials' features
        indices  their places among the model's trials; -1 for a new trial
        most     the number of trials, those with the best mean, to compute it for; the others get 0
        """
        if not points:
            return []
        with one_thread():
            unseen = _unseen(points, indices, epoch)
            cross = _kernel(self._theta, unseen, self._table)
            mean = cross @ self._weights
            chosen = torch.argsort(mean, stable=True)[:most]
            half = _solve(self._factor, cross[chosen].T, upper=False)
            prior = _variance(self._theta, unseen.t[chosen])
            spread = (prior - (half * half).sum(0)).clamp_min(1e-12).sqrt()
            z = (self.leader(epoch) - mean[chosen]) / spread
            density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
            expected = torch.zeros(len(points), dtype=torch.float64)
            expected[chosen] = spread * (z * _ndtr(z) + density)
        return expected.numpy().tolist()

    def leader(self, epoch: int) -> float:
        """Returns the best mean of the model's trials at `epoch`, or the best observed loss if it is better."""
        if epoch not in self._leaders:
            unseen = _unseen(self._trials.points, range(len(self._trials.points)), epoch)
            means = _kernel(self._theta, unseen, self._table) @ self._weights
            self._leaders[epoch] = min(self._warp(self._trials.best), float(means.min()))
        return self._leaders[epoch]


class _Warp:
    """Maps a loss to the model's scale: -1 at the best final loss, 0 at their median, and never above 2."""

    def __init__(self, trials: Trials) -> None:
        ends = sorted(curve[-1][1] for curve in trials.seen)
        self._median, best = ends[len(ends) // 2], ends[0]
        self._scale = (self._median - best) or max(abs(best), 1e-12)

    def __call__(self, loss: float) -> float:
        scaled = (loss - self._median) / self._scale
        return scaled if scaled <= 0 else 2 - 2 / (1 + scaled / 2)


def _all(trials: Trials) -> list[tuple[int, int]]:
    """Returns (trial, index in its curve) of the observations that the model uses."""
    observations = [(i, k) for i, curve in enumerate(trials.seen) for k in range(len(curve))]
    if len(observations) > MOST:
        ends = [(i, len(curve) - 1) for i, curve in enumerate(trials.seen)]
        observations = sorted(sorted(ends, key=lambda end: (trials.seen[end[0]][end[1]][1], end[0]))[:MOST])
    return observations


def _few(trials: Trials, warp: _Warp) -> tuple[tuple[Point, ...], tuple[tuple[int, float, float], ...]]:
    """Returns the data that the hyperparameters are fitted to: features of trials, and (trial, t, y) of observations.

    It has the first trials' observations of each epoch. Their number grows by steps, so that most decisions can use an
    earlier fit.
    """
    by_epoch: dict[int, list[tuple[int, int]]] = {}
    for i, curve in enumerate(trials.seen):
        for k, (epoch, _) in enumerate(curve):
            by_epoch.setdefault(epoch.bit_length(), []).append((i, k))
    chosen = sorted(pair for pairs in by_epoch.values() for pair in pairs[: _step(len(pairs))])
    # The warp changes with every new best loss, so the fit uses the warp of these observations alone.
    kept = sorted({i for i, _ in chosen})
    table = Trials(tuple(trials.points[i] for i in kept), tuple(_upto(trials, chosen, i) for i in kept))
    warp = _Warp(table)
    return table.points, tuple(
        (index, math.log(epoch), warp(loss)) for index, curve in enumerate(table.seen) for epoch, loss in curve
    )


def _upto(trials: Trials, chosen: Sequence[tuple[int, int]], i: int) -> Seen:
    return tuple(trials.seen[j][k] for j, k in chosen if j == i)


def _step(count: int) -> int:
    step = 3
    while (after := math.ceil(step * 1.5)) <= min(count, _FITTED):
        step = after
    return min(step, count)


def _table(trials: Trials, warp: _Warp, chosen: Sequence[tuple[int, int]]) -> _Table:
    return _Table(
        torch.tensor([trials.points[i] for i, _ in chosen], dtype=torch.float64),
        torch.tensor([math.log(trials.seen[i][k][0]) for i, k in chosen], dtype=torch.float64),
        torch.tensor([i for i, _ in chosen]),
        torch.tensor([warp(trials.seen[i][k][1]) for i, k in chosen], dtype=torch.float64),
    )


# The prior's mean and deviation of the logarithm of each hyperparameter: the deviations of f, g, F and G, the exponent
# c and the noise; then the length scales of the features.
_PRIOR = ((-0.3, 0.7), (-1.5, 0.7), (-0.3, 0.7), (-1.0, 0.7), (-0.3, 0.5), (-3.0, 0.7))
_LENGTH = (0.0, 1.0)
_BOUND = 3.0  # deviations of the prior: the range of a hyperparameter
_MEANS = 1.0  # the variance of a and of b


def _kernel(theta: Tensor, one: _Table, other: _Table, same: bool = False) -> Tensor:
    f, g, of_f, of_g, c, noise = theta[:6].exp()
    scales = theta[6:].exp()
    r = torch.cdist(one.x / scales, other.x / scales) * math.sqrt(5)
    alike = (1 + r + r * r / 3) * torch.exp(-r)
    equal = (one.i[:, None] == other.i[None, :]).to(alike.dtype)
    left = torch.exp(-c * one.t)[:, None] * torch.exp(-c * other.t)[None, :]
    kernel = _MEANS * (1 + left) + f * f * alike + g * g * equal + left * (of_f * of_f * alike + of_g * of_g * equal)
    return kernel + torch.eye(len(one.t), dtype=kernel.dtype) * (noise * noise + 1e-6) if same else kernel


def _variance(theta: Tensor, t: Tensor) -> Tensor:
    """Returns the prior variance of y without its noise."""
    f, g, of_f, of_g, c, _ = theta[:6].exp()
    return _MEANS + f * f + g * g + torch.exp(-2 * c * t) * (_MEANS + of_f * of_f + of_g * of_g)


@lru_cache(maxsize=64)
def _fitted(points: tuple[Point, ...], seen: tuple[tuple[int, float, float], ...]) -> Tensor:
    """Returns the logarithms of the hyperparameters of highest posterior density, by Rprop from the prior's mean.

    The variant is iRprop- (Igel and Huesken 2003; Blum and Riedmiller 2013 for Gaussian processes).
    """
    indices = [i for i, _, _ in seen]
    table = _Table(
        torch.tensor([points[i] for i in indices], dtype=torch.float64),
        torch.tensor([t for _, t, _ in seen], dtype=torch.float64),
        torch.tensor(indices),
        torch.tensor([y for _, _, y in seen], dtype=torch.float64),
    )
    middle, width = torch.tensor(_PRIOR + (_LENGTH,) * len(points[0]), dtype=torch.float64).T
    free = torch.zeros_like(middle, requires_grad=True)
    step, before = torch.full_like(middle, 0.2), torch.zeros_like(middle)
    least, best = math.inf, middle
    for _ in range(_STEPS):
        theta = middle + width * free
        value, gradient = _loss(theta, table, free)
        gradient = gradient + free.detach()  # of the prior
        value += 0.5 * float(free.detach().square().sum())
        if value < least:
            least, best = value, theta.detach()
        alike = gradient * before
        step = torch.where(alike > 0, step * 1.2, torch.where(alike < 0, step * 0.5, step)).clamp(1e-3, 0.5)
        before = torch.where(alike < 0, 0.0, gradient)
        with torch.no_grad():
            free -= step * before.sign()
            free.clamp_(-_BOUND, _BOUND)
    return best


def _loss(theta: Tensor, table: _Table, free: Tensor) -> tuple[float, Tensor]:
    """Returns the negative log marginal likelihood up to a constant, and its gradient in `free`.

    Its gradient in the kernel K is (K^-1 - w w') / 2 with w = K^-1 y, so the factorization is not differentiated.
    """
    kernel = _kernel(theta, table, table, same=True)
    factor = _cholesky(kernel.detach())
    weights = torch.cholesky_solve(table.y[:, None], factor)
    value = 0.5 * float(table.y @ weights[:, 0]) + float(factor.diagonal().log().sum())
    outer = 0.5 * (torch.cholesky_inverse(factor) - weights @ weights.T)
    return value, torch.autograd.grad(kernel, free, outer)[0]


@contextmanager
def one_thread() -> Generator[None]:
    """Runs torch with gradients on one CPU thread.

    More threads sum in another order, which could change a decision, and a task in this process may have disabled
    gradients or set another device.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(before)
