"""Gives a strategy the history from which it decides, inside the transaction of a report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from sqlalchemy.engine import Connection

from hpo.ledger.database import statements as sql
from hpo.ledger.history import Curves
from hpo.search.curves import Curve, Group, first_loss, first_losses
from hpo.search.pareto import ranked


class Unsettled(Exception):
    """Raised when an earlier trial than the one being decided has neither reached the epoch nor ended."""


class LedgerHistory:
    """The History (hpo.search.strategies.base) of one trial inside the transaction of a report."""

    def __init__(
        self,
        curves: Curves,
        connection: Connection,
        trial_id: int,
        number: int,
        epoch: int,
        limit: int | None,
    ) -> None:
        self.number, self.epoch = number, epoch
        self._curves, self._connection = curves, connection
        self._trial_id, self._limit = trial_id, limit

    @property
    def curve(self) -> Curve:
        """Returns the trial's own (epoch, loss) pairs, including this epoch."""
        return self._own

    @cached_property
    def _own(self) -> Curve:
        known = self._curves.of(self._connection, self._trial_id)
        return [point for point in known if point[0] <= self.epoch]

    @property
    def told(self) -> bool:
        """Returns True if the curve has this epoch.

        The first report at a step counts, which may have closed no epoch.
        """
        return bool(self.curve) and self.curve[-1][0] == self.epoch

    @property
    def value(self) -> Any:
        """Returns the trial's own loss at this epoch."""
        return self.curve[-1][1]

    def at(self, epoch: int) -> dict[int, Any]:
        """Returns number -> loss of the other trials that closed `epoch`.

        Raises Unsettled if ordered mode cannot tell yet.
        """
        if self._limit is None:
            losses = self._known.ranking(epoch, epoch + 1).losses
            return {number: loss for number, loss in losses.items() if number != self.number}
        if self.unsettled(epoch):
            raise Unsettled
        losses = self._curves.ranking(epoch, epoch + 1).losses
        return {number: loss for number, loss in losses.items() if number < self.number}

    def unsettled(self, epoch: int) -> list[str]:
        """Returns the states of the trials before this one that have neither reached `epoch` nor ended."""
        return self._curves.behind(self._connection, epoch, self.number)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        """Returns the visible trials (of a group) and this one, sorted by their first loss within [epoch, beyond), best
        first."""
        if self._limit is None:
            order = self._known.order(epoch, beyond, group)
            early = first_loss(self.curve, epoch, beyond) is None  # its later reports are unknown here
            return [number for number in order if number != self.number] if early else order
        losses = self._known.ranking(epoch, beyond, group).losses
        seen = {number: loss for number, loss in losses.items() if self._sees(number)}
        return ranked(seen | first_losses({self.number: self.curve}, epoch, beyond))

    def curves(self, states: Collection[str] = ("complete",)) -> dict[int, Curve]:
        """Returns number -> curve of the other visible trials in one of `states`."""
        curves, states_of = self._known.curves, self._known.states
        return {number: curves[number] for number in curves if states_of[number] in states and self._sees(number)}

    def checkpoint(self, number: int) -> str | None:
        """Returns the newest kept checkpoint of another visible trial, as `<trial number>/<path>`."""
        if self._limit is not None and number > self._limit:
            return None
        where = {"study": self._curves.study_id, "trial": number}
        path = self._connection.execute(sql.NEWEST, where).scalar()
        return path and f"{number}/{path}"

    @cached_property
    def _known(self) -> Curves:
        """Returns the curves as this transaction reads them."""
        self._curves.refresh(self._connection, self._limit, own=self.number)
        return self._curves

    def _sees(self, number: int) -> bool:
        return number != self.number and (self._limit is None or number <= self._limit)
