"""Sorts losses of several objectives: non-dominated fronts, and the points of a front that spread widest.

Losses are lower-is-better and of one length. `a` dominates `b` where it is nowhere above and somewhere below it.
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
    """A loss, one or several, of what breaks its constraints: in order behind every loss that breaks none, and behind
    those that break theirs by less in all; otherwise the number or the tuple that it is.

    So the order of losses is constrained domination (Deb et al. 2002, "A Fast and Elitist Multiobjective Genetic
    Algorithm: NSGA-II", section VI).
    """

    violation: float
    bare: Any

    def __eq__(self, other: object) -> bool:
        return _placed(self) == _placed(other)

    def __ne__(self, other: object) -> bool:  # numbers and tuples have one of their own, as of the others
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
    """The loss, one or several, of what is so far beyond its bounds in all; itself where that is 0."""
    if not violation:
        return loss
    found = _ConstrainedTuple(loss) if isinstance(loss, tuple) else _ConstrainedScalar(loss)
    found.violation, found.bare = violation, loss
    return found


def dominates(a: Losses, b: Losses) -> bool:
    if isinstance(a, _ConstrainedLoss) or isinstance(b, _ConstrainedLoss):
        (beyond_a, _), (beyond_b, _) = _placed(a), _placed(b)
        if beyond_a != beyond_b:
            return beyond_a < beyond_b
    return a != b and all(map(operator.le, a, b))


def is_nan(loss: float | Losses) -> bool:
    """Whether a loss, one or several, has a part that is NaN."""
    return any(map(math.isnan, loss)) if isinstance(loss, tuple) else math.isnan(loss)


def fronts(losses: Mapping[int, Losses]) -> list[list[int]]:
    """The keys by fronts, the best first: what no other dominates, then what only the first front does, and so on.

    Ascending within a front. In lexicographic order nothing is dominated by what follows it, and a front that holds
    nothing above a point has none below it that does: so its front is found by bisection (Zhang et al. 2015, "An
    Efficient Approach to Nondominated Sorting for Evolutionary Multiobjective Optimization", ENS-BS).
    """
    found: list[list[int]] = []
    for key in sorted(losses, key=lambda key: (losses[key], key)):
        low, high = 0, len(found)
        while low < high:
            middle = (low + high) // 2
            if _above(losses, found[middle], losses[key]):
                low = middle + 1
            else:
                high = middle
        found[low:low] = [[]] if low == len(found) else []
        found[low].append(key)
    return [sorted(front) for front in found]


def front(losses: Mapping[int, Losses]) -> list[int]:
    """The first of the fronts alone, ascending."""
    found: list[int] = []
    for key in sorted(losses, key=lambda key: (losses[key], key)):
        if not _above(losses, found, losses[key]):
            found.append(key)
    return sorted(found)


def _above(losses: Mapping[int, Losses], front: Sequence[int], point: Losses) -> bool:
    """Whether one of a front, in lexicographic order, dominates the point. With two losses its last does if any."""
    if len(point) <= 2:
        return bool(front) and dominates(losses[front[-1]], point)
    return any(dominates(losses[other], point) for other in reversed(front))


def spread(losses: Mapping[int, Losses]) -> Iterator[int]:
    """The keys of a front, from the one that is best by the first loss on each the farthest from those before it; each
    is looked for as it is asked for.

    So any number of the first cover the front as an epsilon-net does (Salinas et al. 2021, "A Multi-objective
    Perspective on Jointly Tuning Hardware and Hyperparameters"; found best for rungs by Schmucker et al. 2021,
    "Multi-objective Asynchronous Successive Halving"). Distances are of losses scaled to the front's own range.
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
    """How many come before a number in the order of `ranked`, those of its own loss left out; its own has no NaN."""
    sound = {key: loss for key, loss in losses.items() if not is_nan(loss)}
    found = 0
    for front in fronts(sound):
        if number in front:
            before = takewhile(number.__ne__, spread({key: sound[key] for key in front}))
            return found + sum(sound[key] != sound[number] for key in before)
        found += len(front)
    raise AssertionError("what has no NaN is in a front")


def _scaled(loss: float, low: float, span: float) -> float:
    return (loss - low) / span if math.isfinite(loss) and math.isfinite(span) else 0.0 if loss == low else 1.0


def ranked(losses: Mapping[int, Any]) -> list[int]:
    """The keys, best first; what has a NaN last.

    One loss: by it, of equals the lower key. Several: by fronts, each as `spread` has it.
    """
    odd = {key for key, loss in losses.items() if is_nan(loss)}
    sound = {key: loss for key, loss in losses.items() if key not in odd}
    if any(isinstance(loss, tuple) for loss in sound.values()):
        order = [key for front in fronts(sound) for key in spread({key: sound[key] for key in front})]
    else:
        order = sorted(sound, key=lambda key: (sound[key], key))
    return order + sorted(odd)


class Ranking:
    """Losses by number in the order of `ranked`, which is kept as they come: one of n takes log n comparisons."""

    def __init__(self, losses: Mapping[int, Any]) -> None:
        self.losses = dict(losses)
        several = any(isinstance(loss, tuple) for loss in losses.values())
        self._keys = None if several else sorted(map(_key, losses.values(), losses))
        self._order = None if several else [number for _, _, number in self._keys or ()]

    def put(self, number: int, loss: Any) -> None:
        """The loss of a number, in the place of another that it had; None takes it away."""
        before = self.losses.pop(number, None)
        if loss is not None and loss == before:
            self.losses[number] = loss
            return
        if loss is not None:
            self.losses[number] = loss
        if isinstance(loss, tuple):
            self._keys = None
        if self._keys is None or self._order is None:
            self._order = None  # with several losses each new one may change all
            return
        if before is not None:
            place = bisect_left(self._keys, _key(before, number))
            del self._keys[place], self._order[place]
        if loss is not None:
            place = bisect_left(self._keys, key := _key(loss, number))
            self._keys.insert(place, key)
            self._order.insert(place, number)

    @property
    def order(self) -> list[int]:
        """The numbers, the best first."""
        if self._order is None:
            self._order = ranked(self.losses)
        return list(self._order)


def _key(loss: Any, number: int) -> tuple[bool, float, int]:
    odd = math.isnan(loss)
    return odd, 0.0 if odd else loss, number
