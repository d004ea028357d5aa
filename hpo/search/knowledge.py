"""Learns from earlier studies: configurations that a new study tries first, and a density of good values.

Knowledge is plain JSON that the new study keeps in its row, so that the earlier studies are not needed later:

    portfolio   configurations that together were best over the earlier studies, each with its study
    studies     some trials of each earlier study: points of the new study's unit cube in the dimensions that both
                search, null where a dimension was not active, with their regrets; the first `good` are its best

A regret is (value - best) / (median - best) over a study's trials, between 0 and 2, so that studies of different data
can be compared. The worth of an earlier study is computed from the new study's trials by the ranking loss of Feurer et
al. 2018 ("Scalable Meta-Learning for Bayesian Optimization", RGPE): the share of pairs of trials that the earlier study
puts in the wrong order.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.errors import SpaceError
from hpo.space.dimensions import Choice
from hpo.space.values import same

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpo.space.space import Space

MOST = 16  # earlier studies, the newest
FIRST = 4  # configurations of the portfolio, at most
KEPT = 64  # trials of a study that are kept: half of them the best, the others spread evenly over the ranks
_CANDIDATES = 32  # the best trials of each study, from which the portfolio is chosen
_GOOD, _FEWEST = 0.1, 3  # the share of a study's trials that counts as good, and their least number
_WORST = 2.0  # the greatest regret
_GAIN = 0.01  # the least reduction of mean regret by a further configuration of the portfolio
_NEAREST = 3  # trials that predict a point
_NARROW, _WIDE = 0.03, 0.2  # bounds of a kernel's width, as a share of the range
_ELSEWHERE = 0.1  # the probability with which a choice takes another option than its kernel's
_DIGITS = 6

Knowledge = Mapping[str, Any]
Trial = tuple[Mapping[str, Any], float]  # parameters, regret
Place = Sequence[float | None]


def regrets(values: Sequence[Sequence[float] | None]) -> list[float]:
    """Returns the standardised regrets of trials from their losses, one for each objective.

    None gets the worst regret. With several objectives a trial has the mean of its regrets.
    """
    scored = [row for row in values if row is not None]
    columns = list(zip(*scored, strict=True))
    best, middle = [min(column) for column in columns], [statistics.median(column) for column in columns]

    def regret(row: Sequence[float]) -> float:
        parts = [(x - low) / ((m - low) or 1.0) for x, low, m in zip(row, best, middle, strict=True)]
        return min(math.fsum(min(part, _WORST) for part in parts) / len(parts), _WORST)

    return [_WORST if row is None else round(regret(row), _DIGITS) for row in values]


def teach(space: Space, studies: Mapping[str, Sequence[Trial]]) -> dict[str, Any]:
    """Returns the knowledge that earlier studies, by name, give to a study of `space`.

    Trials with values outside the space are left out, and so are studies with fewer than two other trials.
    """
    lessons: list[dict[str, Any]] = []
    wholes: list[tuple[_Study, list[Trial]]] = []
    for name, trials in studies.items():
        placed = [(params, regret, _point(space, params)) for params, regret in trials]
        known = sorted(((p, r, point) for p, r, point in placed if point), key=lambda trial: trial[1])
        paths = [path for path in space.paths if any(path in point for *_, point in known)]
        if len(known) < 2 or not paths:
            continue
        points = [[point.get(path) for path in paths] for *_, point in known]
        good = min(max(math.ceil(_GOOD * len(known)), _FEWEST), KEPT // 2, len(known))
        lesson = {"study": name, "trials": len(known), "paths": paths, "good": good}
        scores, chosen = [regret for _, regret, _ in known], _kept(len(known))
        whole = _Study(space, lesson | {"points": points, "regrets": scores})
        wholes.append((whole, [(params, regret) for params, regret, _ in known]))
        lessons.append(lesson | {"points": [points[k] for k in chosen], "regrets": [scores[k] for k in chosen]})
    return {"portfolio": _portfolio(space, wholes), "studies": lessons} if lessons else {}


def _kept(count: int) -> list[int]:
    """Returns the ranks of the trials that are kept."""
    if count <= KEPT:
        return list(range(count))
    half = KEPT // 2
    return [*range(half), *(half + k * (count - half - 1) // (half - 1) for k in range(half))]


def _point(space: Space, params: Mapping[str, Any]) -> dict[str, float]:
    """Returns path -> point of the parameters in the unit cube; empty if the space does not contain them."""
    shared = {path: value for path, value in params.items() if path in space.dimensions}
    try:
        coordinates = space.encode(shared, space.from_unit([0.5] * len(space)), strict=False)
    except SpaceError:
        return {}
    decoded = space.decode(coordinates)
    if not all(same(decoded[path], value) for path, value in shared.items() if path in decoded):
        return {}
    return {
        path: round(space.dimensions[path].to_unit(coordinates[path]), _DIGITS) for path in shared if path in decoded
    }


def _portfolio(space: Space, studies: Sequence[tuple[_Study, list[Trial]]]) -> list[dict[str, Any]]:
    """Returns the configurations that together have the least mean regret over the studies, chosen greedily.

    The regrets are those that each study predicts (Wistuba et al. 2015, "Sequential Model-Free Hyperparameter Tuning").
    """
    candidates: list[tuple[str, Mapping[str, Any]]] = []
    columns: list[NDArray[np.float64]] = []
    for study, trials in studies:
        for params, _ in trials[:_CANDIDATES]:
            point = _point(space, params)
            candidates.append((study.name, {path: params[path] for path in point}))
            columns.append(np.array([min(other.predict(point), 1.0) for other, _ in studies]))
    left, chosen = np.ones(len(studies)), list[dict[str, Any]]()
    while len(chosen) < FIRST:
        after = [round(float(np.minimum(left, column).mean()), _DIGITS) for column in columns]
        best = min(range(len(after)), key=lambda k: (after[k], k))
        if chosen and left.mean() - after[best] < _GAIN:
            break
        left = np.minimum(left, columns[best])
        chosen.append({"study": candidates[best][0], "params": dict(candidates[best][1])})
    return chosen


class _Study:
    """An earlier study, which predicts the regret of a point and draws points near its good ones."""

    def __init__(self, space: Space, lesson: Mapping[str, Any]) -> None:
        self.name, self.paths = lesson["study"], lesson["paths"]
        self._choices = np.array([isinstance(space.dimensions[path], Choice) for path in self.paths])
        self._points = np.array(lesson["points"], dtype=float)
        self._regrets = np.array(lesson["regrets"])
        self.good = lesson["points"][: lesson["good"]]

    def predict(self, point: Mapping[str, float]) -> float:
        """Returns the mean regret of the nearest trials, weighted by the inverse of their squared distance."""
        query = np.array([point.get(path, math.nan) for path in self.paths])
        apart = np.abs(self._points - query)
        apart = np.where(self._choices & (apart > 0), 1.0, apart)
        none = np.isnan(self._points)
        apart = np.where(none & np.isnan(query), 0.0, np.where(none | np.isnan(query), 0.5, apart))
        squares = (apart * apart).sum(axis=1)
        nearest = np.argsort(squares, kind="stable")[:_NEAREST]
        weights = 1.0 / (squares[nearest] + 1e-6)
        return float((weights * self._regrets[nearest]).sum() / weights.sum())

    @cached_property
    def widths(self) -> list[float]:
        """Returns the kernels' widths, by Scott's rule of each dimension."""
        count = len(self.good) ** (-1 / (len(self.paths) + 4))
        columns = ([x for x in column if x is not None] for column in zip(*self.good, strict=True))
        spreads = (statistics.pstdev(column) if column else 0.0 for column in columns)
        return [min(max(spread * count, _NARROW), _WIDE) for spread in spreads]

    def draw(self, uniforms: Sequence[float], normals: Sequence[float], anew: Sequence[float]) -> dict[str, float]:
        """Returns a point near a good one.

        uniforms       a number that chooses the good place, then one for each dimension
        normals, anew  a number for each dimension
        """
        centre = self.good[min(int(uniforms[0] * len(self.good)), len(self.good) - 1)]
        drawn: dict[str, float] = {}
        for k, (path, at) in enumerate(zip(self.paths, centre, strict=True)):
            if at is None:
                continue
            if self._choices[k]:
                drawn[path] = anew[k] if uniforms[1 + k] < _ELSEWHERE else at
            else:
                drawn[path] = min(max(at + self.widths[k] * normals[k], 0.0), 1.0)
        return drawn


@dataclass(frozen=True)
class Observed:
    """A trial of the new study: its point in the unit cube and its curve of (epoch, loss); a lower loss is better."""

    point: Mapping[str, float]
    curve: Sequence[tuple[int, float]]


class Teachers:
    """The earlier studies in one study's knowledge, with the worth of each."""

    FIRST_TRIALS = 32  # trials of the new study from which the worths are computed
    PRIOR, AGREEMENT = 4.0, 0.5  # the prior of a worth: as if PRIOR trials had agreed by AGREEMENT
    LEAST = 0.2  # a lower worth counts as 0

    def __init__(self, space: Space, knowledge: Knowledge) -> None:
        self.studies = [_Study(space, lesson) for lesson in knowledge["studies"]]
        self._predicted: dict[int, NDArray[np.float64]] = {}

    def worths(self, trials: Mapping[int, Observed]) -> list[float]:
        """Returns the worth of each study, from 0 to 1, given these trials of the new study, by number.

        It is the rank correlation with the observed losses, shrunk towards the prior while there are few trials.
        """
        wrong, pairs = np.zeros(len(self.studies)), 0
        for (number, trial), (other, before) in combinations(trials.items(), 2):
            losses = _common(trial.curve, before.curve)
            if losses and losses[0] != losses[1]:
                gap = self._predict(number, trial) - self._predict(other, before)
                wrong += np.where(gap == 0, 0.5, gap * (losses[0] - losses[1]) < 0)
                pairs += 1
        count = len(trials) if pairs else 0
        worths = ((1.0 - 2.0 * wrong / max(pairs, 1)) * count + self.AGREEMENT * self.PRIOR) / (count + self.PRIOR)
        return [round(worth, 9) if worth >= self.LEAST else 0.0 for worth in worths.tolist()]

    def _predict(self, number: int, trial: Observed) -> NDArray[np.float64]:
        if number not in self._predicted:
            self._predicted[number] = np.array([study.predict(trial.point) for study in self.studies])
        return self._predicted[number]


def _common(curve: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Returns the least losses of two curves up to their last common epoch; None if one has no finite loss."""
    epoch = min(curve[-1][0], other[-1][0])
    here, there = (
        min((loss for at, loss in points if at <= epoch and math.isfinite(loss)), default=math.inf)
        for points in (curve, other)
    )
    return (here, there) if math.isfinite(here) and math.isfinite(there) else None
