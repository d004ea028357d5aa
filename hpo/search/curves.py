"""Reads curves, which are ascending (epoch, loss) pairs; with several objectives a loss is a tuple."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from hpo.search.pareto import Ranking

Curve = Sequence[tuple[int, Any]]
Group = Callable[[int], bool]  # whether a trial belongs to it; equal groups have equal members
_epoch = itemgetter(0)
_KEPT = 128  # rankings; even many brackets have few rungs, and strategies that decide at every epoch use the newest


def first_loss(curve: Curve, epoch: int, beyond: float) -> Any:
    """Returns the first loss within [epoch, beyond), or None."""
    first = bisect_left(curve, epoch, key=_epoch)
    return curve[first][1] if first < len(curve) and curve[first][0] < beyond else None


def first_losses(curves: Mapping[int, Curve], epoch: int, beyond: float, group: Group | None = None) -> dict[int, Any]:
    """Returns number -> first loss within [epoch, beyond) for the curves (of a group) that have a loss there."""
    losses = {n: loss for n, curve in curves.items() if (loss := first_loss(curve, epoch, beyond)) is not None}
    return losses if group is None else {n: loss for n, loss in losses.items() if group(n)}


class Rankings:
    """The most recently used rankings of `curves`, updated as the curves grow."""

    def __init__(self, curves: Mapping[int, Curve]) -> None:
        self._curves = curves
        self._kept: dict[tuple[int, float, Group | None], Ranking] = {}

    def put(self, number: int) -> None:
        """Updates the rankings after a trial's curve has changed."""
        for (epoch, beyond, group), ranking in self._kept.items():
            if group is None or group(number):
                ranking.put(number, first_loss(self._curves[number], epoch, beyond))

    def of(self, epoch: int, beyond: float, group: Group | None = None) -> Ranking:
        """Returns the ranking of the first losses within [epoch, beyond), of all trials or of a group."""
        key = (epoch, beyond, group)
        ranking = self._kept.pop(key, None) or Ranking(first_losses(self._curves, *key))
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = ranking  # most recently used
        return ranking
