"""A curve, as strategies and the ledger have it: (epoch, loss), ascending; of several objectives a loss is a tuple."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from hpo.search.pareto import Ranking

Curve = Sequence[tuple[int, Any]]
Group = Callable[[int], bool]  # whether a trial is of it; equal ones have equal members
_epoch = itemgetter(0)
_KEPT = 128  # rankings; rungs are few, also those of many brackets, and who asks at every epoch asks for the newest


def first_loss(curve: Curve, epoch: int, beyond: float) -> Any:
    """The first loss within [epoch, beyond), None where there is none."""
    place = bisect_left(curve, epoch, key=_epoch)
    return curve[place][1] if place < len(curve) and curve[place][0] < beyond else None


def first_losses(curves: Mapping[int, Curve], epoch: int, beyond: float, group: Group | None = None) -> dict[int, Any]:
    """Number -> the first loss within [epoch, beyond), of the curves (of a group) that have one."""
    found = {number: loss for number, curve in curves.items() if (loss := first_loss(curve, epoch, beyond)) is not None}
    return found if group is None else {number: loss for number, loss in found.items() if group(number)}


class Rankings:
    """The rankings of `curves` that were asked for, kept as the curves grow; of many those asked for last."""

    def __init__(self, curves: Mapping[int, Curve]) -> None:
        self._curves = curves
        self._kept: dict[tuple[int, float, Group | None], Ranking] = {}

    def put(self, number: int) -> None:
        """The curve of a trial has changed."""
        for (epoch, beyond, group), ranking in self._kept.items():
            if group is None or group(number):
                ranking.put(number, first_loss(self._curves[number], epoch, beyond))

    def of(self, epoch: int, beyond: float, group: Group | None = None) -> Ranking:
        """Of the first losses within [epoch, beyond), of all trials or of a group."""
        key = (epoch, beyond, group)
        found = self._kept.pop(key, None) or Ranking(first_losses(self._curves, *key))
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found  # the last
        return found
