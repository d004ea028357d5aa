"""A curve, as strategies and the ledger have it: (epoch, loss), ascending; of several objectives a loss is a tuple."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

Curve = Sequence[tuple[int, Any]]
_epoch = itemgetter(0)


def first_loss(curve: Curve, epoch: int, beyond: float) -> Any:
    """The first loss within [epoch, beyond), None where there is none."""
    place = bisect_left(curve, epoch, key=_epoch)
    return curve[place][1] if place < len(curve) and curve[place][0] < beyond else None


def first_losses(curves: Mapping[int, Curve], epoch: int, beyond: float) -> dict[int, Any]:
    """Number -> the first loss within [epoch, beyond), of the curves that have one."""
    return {number: loss for number, curve in curves.items() if (loss := first_loss(curve, epoch, beyond)) is not None}
