"""Models learning curves and configurations by a Gaussian process, to predict how trials will end.

With x a configuration's features and i a trial, the best loss up to an epoch, warped, is a power law of the epoch
(Kadra et al. 2023, "Scaling Laws for Hyperparameter Optimization"; there by an ensemble of networks):

    y_i(epoch) = a_i + b_i epoch^-c + noise,    a_i = a + f(x_i) + g_i,    b_i = b + F(x_i) + G_i

f and F have a Matern 5/2 kernel with a length scale for each feature: what configurations say of where a curve ends,
and how far it is to fall. g_i and G_i are normal, a trial's own. As all is linear in them and c is common to all, the
posterior is that of a Gaussian process, in closed form, as in freeze-thaw (Swersky et al. 2014), whose decays are
exponential. Pure torch, float64, one thread: a function of its data.
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
_FIRST, _TIMES = 4, 3  # the model looks at a curve from that epoch on, and when it has grown so many times as long
_FITTED = 48  # at most so many of one epoch give the length scales
_STEPS = 25

# torch has no types of these.
_cholesky = cast("Callable[[Tensor], Tensor]", torch.linalg.cholesky)  # pyright: ignore[reportUnknownMemberType]
_solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
_ndtr = cast("Callable[[Tensor], Tensor]", torch.special.ndtr)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True)
class Trials:
    """Trials that have been observed: their features, each in [0, 1], and what was seen of them. Plain and hashable."""

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
    """The trials that have features and a finite loss, by number, and what is taken of their curves.

    Of a curve the points count at which it came to epoch 4, 12, 36 ..., and its end unless it is still `growing`: what
    lies before says next to nothing of where it ends, and leads the model astray (docs/log.md); and a model that holds
    the newest epoch of whatever trains is made anew at every look. `by_best` takes the least loss so far in place of
    the loss there, where that is what a trial is judged by. One that ends on a loss that is not finite counts as the
    worst of all, no earlier than the others' points do.
    """
    ended = [curve for number, curve in curves.items() if number not in growing and curve]
    worst = max((loss for curve in ended for _, loss in curve if math.isfinite(loss)), default=math.nan)
    first = min(_FIRST, max((curve[-1][0] for curve in ended), default=_FIRST))
    thin = partial(_thinned, worst=(first, worst), by_best=by_best)
    known = {n: thin(curves[n], ended=n not in growing) for n in sorted(points) if curves.get(n)}
    numbers = [number for number, seen in known.items() if seen and math.isfinite(worst)]
    return numbers, Trials(tuple(points[n] for n in numbers), tuple(known[n] for n in numbers))


def _thinned(curve: Sequence[tuple[int, float]], worst: tuple[int, float], ended: bool, by_best: bool) -> Seen:
    least, mark = math.inf, _FIRST
    found: list[tuple[int, float]] = []
    for place, (epoch, loss) in enumerate(curve):
        finite, end = math.isfinite(loss), ended and place == len(curve) - 1
        least = min(least, loss) if finite else least
        if end or (epoch >= mark and finite):
            point = (epoch, least if by_best else loss) if finite else (max(epoch, worst[0]), worst[1])
            found.append((max(point[0], 1), point[1]))
        while epoch >= mark:
            mark *= _TIMES
    return tuple(found)


@dataclass(frozen=True)
class _Table:
    """Observations: x [n, d], t [n] the logarithm of the epoch, y [n], i [n] the trial's index."""

    x: Tensor
    t: Tensor
    i: Tensor
    y: Tensor


def _unseen(points: Sequence[Point], indices: Sequence[int], epoch: int) -> _Table:
    """These trials at an epoch."""
    x = torch.tensor(points, dtype=torch.float64)
    t = torch.full((len(x),), math.log(epoch), dtype=torch.float64)
    return _Table(x, t, torch.tensor(indices), torch.empty(0, dtype=torch.float64))


class Model:
    """The posterior, given trials. `Model.of` gives the one made last where nothing is new."""

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
        """The expected improvement on `leader(epoch)`, on the warped scale, of trials by the time they have `epoch`.

        points, indices   features, and the place among the model's trials; -1 of a new one
        most              of so many, those with the best mean, it is worked out; it is 0 for the others
        """
        if not points:
            return []
        with one_thread():
            at = _unseen(points, indices, epoch)
            cross = _kernel(self._theta, at, self._table)
            mean = cross @ self._weights
            chosen = torch.argsort(mean, stable=True)[:most]
            half = _solve(self._factor, cross[chosen].T, upper=False)
            prior = _variance(self._theta, at.t[chosen])
            spread = (prior - (half * half).sum(0)).clamp_min(1e-12).sqrt()
            z = (self.leader(epoch) - mean[chosen]) / spread
            density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
            found = torch.zeros(len(points), dtype=torch.float64)
            found[chosen] = spread * (z * _ndtr(z) + density)
        return found.numpy().tolist()

    def leader(self, epoch: int) -> float:
        """The best mean of any trial of the model at `epoch`, or what was seen where that is better."""
        if epoch not in self._leaders:
            at = _unseen(self._trials.points, range(len(self._trials.points)), epoch)
            means = _kernel(self._theta, at, self._table) @ self._weights
            self._leaders[epoch] = min(self._warp(self._trials.best), float(means.min()))
        return self._leaders[epoch]


class _Warp:
    """A loss on the model's scale: -1 at the best, 0 at the median of the trials' best, and never above 2."""

    def __init__(self, trials: Trials) -> None:
        ends = sorted(curve[-1][1] for curve in trials.seen)
        self._median, best = ends[len(ends) // 2], ends[0]
        self._scale = (self._median - best) or max(abs(best), 1e-12)

    def __call__(self, loss: float) -> float:
        scaled = (loss - self._median) / self._scale
        return scaled if scaled <= 0 else 2 - 2 / (1 + scaled / 2)


def _all(trials: Trials) -> list[tuple[int, int]]:
    """(trial, place in its curve) of the observations that the model takes in."""
    found = [(i, k) for i, curve in enumerate(trials.seen) for k in range(len(curve))]
    if len(found) > MOST:
        ends = [(i, len(curve) - 1) for i, curve in enumerate(trials.seen)]
        found = sorted(sorted(ends, key=lambda one: (trials.seen[one[0]][one[1]][1], one[0]))[:MOST])
    return found


def _few(trials: Trials, warp: _Warp) -> tuple[tuple[Point, ...], tuple[tuple[int, float, float], ...]]:
    """What the hyperparameters are fitted to: of each epoch's observations the first so many trials, a number that
    grows by steps, so that most decisions find them fitted. Features of trials; (trial, t, y) of observations."""
    by_epoch: dict[int, list[tuple[int, int]]] = {}
    for i, curve in enumerate(trials.seen):
        for k, (epoch, _) in enumerate(curve):
            by_epoch.setdefault(epoch.bit_length(), []).append((i, k))
    chosen = sorted(one for here in by_epoch.values() for one in here[: _step(len(here))])
    # The warp moves with every new best loss: the fit takes it as it was for these observations alone.
    kept = sorted({i for i, _ in chosen})
    table = Trials(tuple(trials.points[i] for i in kept), tuple(_upto(trials, chosen, i) for i in kept))
    warp = _Warp(table)
    return table.points, tuple(
        (place, math.log(epoch), warp(loss)) for place, curve in enumerate(table.seen) for epoch, loss in curve
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


# The logarithms of the hyperparameters, each with its prior's mean and deviation: the deviations of f, g, F and G, the
# exponent c, the noise; then the length scales of the features.
_PRIOR = ((-0.3, 0.7), (-1.5, 0.7), (-0.3, 0.7), (-1.0, 0.7), (-0.3, 0.5), (-3.0, 0.7))
_LENGTH = (0.0, 1.0)
_BOUND = 3.0  # deviations of the prior beyond which no hyperparameter goes
_MEANS = 1.0  # the variance of a and of b


def _kernel(theta: Tensor, one: _Table, other: _Table, same: bool = False) -> Tensor:
    f, g, of_f, of_g, c, noise = theta[:6].exp()
    scales = theta[6:].exp()
    r = torch.cdist(one.x / scales, other.x / scales) * math.sqrt(5)
    alike = (1 + r + r * r / 3) * torch.exp(-r)
    own = (one.i[:, None] == other.i[None, :]).to(alike.dtype)
    left = torch.exp(-c * one.t)[:, None] * torch.exp(-c * other.t)[None, :]
    found = _MEANS * (1 + left) + f * f * alike + g * g * own + left * (of_f * of_f * alike + of_g * of_g * own)
    return found + torch.eye(len(one.t), dtype=found.dtype) * (noise * noise + 1e-6) if same else found


def _variance(theta: Tensor, t: Tensor) -> Tensor:
    """Of y without its noise."""
    f, g, of_f, of_g, c, _ = theta[:6].exp()
    return _MEANS + f * f + g * g + torch.exp(-2 * c * t) * (_MEANS + of_f * of_f + of_g * of_g)


@lru_cache(maxsize=64)
def _fitted(points: tuple[Point, ...], seen: tuple[tuple[int, float, float], ...]) -> Tensor:
    """The logarithms of the hyperparameters of highest posterior density, by Rprop from the prior's middle (iRprop-,
    Igel and Huesken 2003; Blum and Riedmiller 2013 for Gaussian processes)."""
    places = [i for i, _, _ in seen]
    table = _Table(
        torch.tensor([points[i] for i in places], dtype=torch.float64),
        torch.tensor([t for _, t, _ in seen], dtype=torch.float64),
        torch.tensor(places),
        torch.tensor([y for _, _, y in seen], dtype=torch.float64),
    )
    middle, width = torch.tensor(_PRIOR + (_LENGTH,) * len(points[0]), dtype=torch.float64).T
    free = torch.zeros_like(middle, requires_grad=True)
    step, before = torch.full_like(middle, 0.2), torch.zeros_like(middle)
    least, found = math.inf, middle
    for _ in range(_STEPS):
        theta = middle + width * free
        value, gradient = _loss(theta, table, free)
        gradient = gradient + free.detach()  # of the prior
        value += 0.5 * float(free.detach().square().sum())
        if value < least:
            least, found = value, theta.detach()
        alike = gradient * before
        step = torch.where(alike > 0, step * 1.2, torch.where(alike < 0, step * 0.5, step)).clamp(1e-3, 0.5)
        before = torch.where(alike < 0, 0.0, gradient)
        with torch.no_grad():
            free -= step * before.sign()
            free.clamp_(-_BOUND, _BOUND)
    return found


def _loss(theta: Tensor, table: _Table, free: Tensor) -> tuple[float, Tensor]:
    """The negative logarithm of the marginal likelihood, but for a constant, and its gradient in `free`.

    Of the kernel K it is (K^-1 - w w') / 2 with w = K^-1 y: so nothing is differentiated through the factorization.
    """
    kernel = _kernel(theta, table, table, same=True)
    factor = _cholesky(kernel.detach())
    weights = torch.cholesky_solve(table.y[:, None], factor)
    value = 0.5 * float(table.y @ weights[:, 0]) + float(factor.diagonal().log().sum())
    outer = 0.5 * (torch.cholesky_inverse(factor) - weights @ weights.T)
    return value, torch.autograd.grad(kernel, free, outer)[0]


@contextmanager
def one_thread() -> Generator[None]:
    """More threads add in another order, and so decide otherwise; and a task that trains in this process may have left
    torch without gradients, or with another device."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(before)
