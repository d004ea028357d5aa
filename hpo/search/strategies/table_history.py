"""Holds a history in memory, from which a strategy decides without a ledger."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.search.curves import Curve, Group, first_losses
from hpo.search.pareto import ranked


@dataclass(frozen=True)
class TableHistory:
    """A history in memory, for simulation and tests.

    tables   number -> (epoch, loss) of every trial, ascending; includes the trial to decide about
    states   number -> state; a trial that is not listed is running
    visible  in ordered mode the highest number of another trial that may be read; None: all may be read
    """

    number: int
    epoch: int
    tables: Mapping[int, Curve]
    states: Mapping[int, str] = field(default_factory=dict[int, str])
    visible: int | None = None

    @property
    def value(self) -> Any:
        return self.curve[-1][1]

    @property
    def curve(self) -> Curve:
        curve = self.tables[self.number]
        return curve[: bisect_right(curve, self.epoch, key=lambda point: point[0])]

    def _others(self) -> Mapping[int, Curve]:
        limit = math.inf if self.visible is None else self.visible
        return {number: curve for number, curve in self.tables.items() if number != self.number and number <= limit}

    def at(self, epoch: int) -> Mapping[int, Any]:
        curves = self._others() if self.visible is None else {n: c for n, c in self.tables.items() if n < self.number}
        return first_losses(curves, epoch, epoch + 1)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        return ranked(first_losses({**self._others(), self.number: self.curve}, epoch, beyond, group))

    def curves(self, states: Collection[str] = ("complete",)) -> Mapping[int, Curve]:
        return {
            number: curve for number, curve in self._others().items() if self.states.get(number, "running") in states
        }

    def checkpoint(self, number: int) -> str | None:
        """Returns None: a table has no checkpoints."""
        return None
