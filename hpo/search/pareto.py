"""Sorts losses of several objectives into non-dominated fronts, and the points of a front by their spread.

Lower losses are better, and all have the same length. `a` dominates `b` if it is nowhere larger and somewhere smaller.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Losses = tuple[float, ...]


class _ConstrainedLoss:
    """The loss, a number or a tuple, of a trial that breaks constraints.

    It ranks behind every loss that breaks none and behind losses whose total violation is smaller. Apart from its order
    it behaves as the number or the tuple. So losses are ordered by constrained domination (Deb et al. 2002, "A Fast and
    Elitist Multiobjective Genetic Algorithm: NSGA-II", section VI).
    """

    violation: float
    bare: Any

    def __eq__(self, other: object) -> bool:
        return _placed(self) == _placed(other)

    def __ne__(self, other: object) -> bool:  # overrides that of numbers and tuples, like the methods below
        return _placed(self) != _placed(other)

    def __lt__(self, other: Any) -> bool:
        return _placed(self) < _placed(other)

    def __le__(self, other: Any) -> bool:
        return _placed(self) <= _placed(other)

    def __gt__(self, other: Any) -> bool:
        return _placed(self) > _placed(other)

    def __ge__(self, other: Any) -> bool:
        return _placed(self) >= _placed(other)

    def __hash__(self) -> int:
        return hash(_placed(self))


class _ConstrainedScalar(_ConstrainedLoss, float): ...


class _ConstrainedTuple(_ConstrainedLoss, tuple[float, ...]): ...


def _placed(loss: object) -> tuple[float, Any]:
    return (loss.violation, loss.bare) if isinstance(loss, _ConstrainedLoss) else (0.0, loss)


def beyond(loss: float | Losses, violation: float) -> Any:
    """Returns the loss with its total violation of constraints attached; the loss itself if that is 0."""
    if not violation:
        return loss
    constrained = _ConstrainedTuple(loss) if isinstance(loss, tuple) else _ConstrainedScalar(loss)
    constrained.violation, constrained.bare = violation, loss
    return constrained


def breaks(loss: float | Losses) -> bool:
    """Returns whether the loss is that of a trial that breaks a constraint."""
    return isinstance(loss, _ConstrainedLoss)


def dominates(a: Losses, b: Losses) -> bool:
    if isinstance(a, _ConstrainedLoss) or isinstance(b, _ConstrainedLoss):
        (beyond_a, _), (beyond_b, _) = _placed(a), _placed(b)
        if beyond_a != beyond_b:
            return beyond_a < beyond_b
    return a != b and all(map(operator.le, a, b))


def is_nan(loss: float | Losses) -> bool:
    """Returns whether a loss, a number or a tuple, contains NaN."""
    return any(map(math.isnan, loss)) if isinstance(loss, tuple) else math.isnan(loss)


def fronts(losses: Mapping[int, Losses]) -> list[list[int]]:
    """Returns the keys by front, the best front first; keys ascend within a front.

    No point dominates those of the first front, only points of the first front dominate those of the second, and so on.
    In lexicographic order no point is dominated by a later one, and if no point of a front dominates a given point, no
    point of a later front does. So bisection finds its front (Zhang et al. 2015, "An Efficient Approach to Nondominated
    Sorting for Evolutionary Multiobjective Optimization", ENS-BS).
    """
    members: list[list[int]] = []
    for key in sorted(losses, key=lambda key: (losses[key], key)):
        low, high = 0, len(members)
        while low < high:
            middle = (low + high) // 2
            if _above(losses, members[middle], losses[key]):
                low = middle + 1
            else:
                high = middle
        members[low:low] = [[]] if low == len(members) else []
        members[low].append(key)
    return [sorted(front) for front in members]


def front(losses: Mapping[int, Losses]) -> list[int]:
    """Returns the keys of the first front, ascending."""
    members: list[int] = []
    for key in sorted(losses, key=lambda key: (losses[key], key)):
        if not _above(losses, members, losses[key]):
            members.append(key)
    return sorted(members)


def _above(losses: Mapping[int, Losses], front: Sequence[int], point: Losses) -> bool:
    """Returns whether a point of a front in lexicographic order dominates `point`; with two losses the last decides."""
    if len(point) <= 2:
        return bool(front) and dominates(losses[front[-1]], point)
    return any(dominates(losses[other], point) for other in reversed(front))


def spread(losses: Mapping[int, Losses]) -> Iterator[int]:
    """Yields the keys of a front: the best by the first loss, then each time the key farthest from all before it.

    So the first keys, however many, cover the front as an epsilon-net does (Salinas et al. 2021, "A Multi-objective
    Perspective on Jointly Tuning Hardware and Hyperparameters"; best for rungs according to Schmucker et al. 2021,
    "Multi-objective Asynchronous Successive Halving"). Distances are between losses scaled to the front's range. Each
    key is computed when it is requested.
    """
    columns = list(zip(*losses.values(), strict=True))
    scales = [(min(column), (max(column) - min(column)) or 1.0) for column in columns]
    points = {
        key: tuple(_scaled(loss, low, span) for loss, (low, span) in zip(losses[key], scales, strict=True))
        for key in sorted(losses)
    }
    nearest = dict.fromkeys(points, math.inf)
    key = min(points, key=lambda k: (losses[k], k))
    while True:
        yield key
        del nearest[key]
        if not nearest:
            return
        nearest = {k: min(gap, math.dist(points[k], points[key])) for k, gap in nearest.items()}
        far = max(nearest.values())
        key = min(k for k, gap in nearest.items() if gap == far)


def ahead(losses: Mapping[int, Losses], number: int) -> int:
    """Returns how many losses other than that of `number`, which has no NaN, precede it in the order of `ranked`."""
    sound = {key: loss for key, loss in losses.items() if not is_nan(loss)}
    preceding = 0
    for front in fronts(sound):
        if number in front:
            before = takewhile(number.__ne__, spread({key: sound[key] for key in front}))
            return preceding + sum(sound[key] != sound[number] for key in before)
        preceding += len(front)
    raise AssertionError("what has no NaN is in a front")


def _scaled(loss: float, low: float, span: float) -> float:
    return (loss - low) / span if math.isfinite(loss) and math.isfinite(span) else 0.0 if loss == low else 1.0


def ranked(losses: Mapping[int, Any]) -> list[int]:
    """Returns the keys, best first; losses with NaN come last.

    A single loss is sorted by value, and ties by key. Several losses are sorted by front, and each front by `spread`.
    """
    odd = {key for key, loss in losses.items() if is_nan(loss)}
    sound = {key: loss for key, loss in losses.items() if key not in odd}
    if any(isinstance(loss, tuple) for loss in sound.values()):
        order = [key for front in fronts(sound) for key in spread({key: sound[key] for key in front})]
    else:
        order = sorted(sound, key=lambda key: (sound[key], key))
    return order + sorted(odd)


class Ranking:
    """Losses by number in the order of `ranked`, updated incrementally: a change among n takes log n comparisons."""

    def __init__(self, losses: Mapping[int, Any]) -> None:
        self.losses = dict(losses)
        several = any(isinstance(loss, tuple) for loss in losses.values())
        self._keys = None if several else sorted(map(_key, losses.values(), losses))
        self._order = None if several else [number for _, _, number in self._keys or ()]

    def put(self, number: int, loss: Any) -> None:
        """Sets the loss of a number, replacing an earlier one; None removes it."""
        before = self.losses.pop(number, None)
        if loss is not None and loss == before:
            self.losses[number] = loss
            return
        if loss is not None:
            self.losses[number] = loss
        if isinstance(loss, tuple):
            self._keys = None
        if self._keys is None or self._order is None:
            self._order = None  # with several objectives any new loss may change the whole order
            return
        if before is not None:
            position = bisect_left(self._keys, _key(before, number))
            del self._keys[position], self._order[position]
        if loss is not None:
            position = bisect_left(self._keys, key := _key(loss, number))
            self._keys.insert(position, key)
            self._order.insert(position, number)

    @property
    def order(self) -> list[int]:
        """Returns the numbers, best first."""
        if self._order is None:
            self._order = ranked(self.losses)
        return list(self._order)


def _key(loss: Any, number: int) -> tuple[bool, float, int]:
    odd = math.isnan(loss)
    return odd, 0.0 if odd else loss, number
