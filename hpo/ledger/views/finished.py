"""Reads the trials of a study with the values that judge them: for stopped trials later trained to their end, the final
ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from sqlalchemy.engine import Connection

from hpo.ledger import queries
from hpo.ledger.finished import Finished, finished
from hpo.ledger.rows import AskedTrial, StudyRow

_columns = attrgetter(*AskedTrial.__match_args__)


@dataclass(frozen=True, slots=True)
class JudgedTrial(AskedTrial):
    """A trial with the training that took it to its end after it had been stopped, None if there is none.

    If there is one, `values` and `epoch` are that training's.
    """

    finished: Finished | None = None

    @property
    def is_whole(self) -> bool:
        """Returns True for a trial that was trained to its end."""
        return self.state == "complete" or self.finished is not None


def trial_rows(connection: Connection, study: StudyRow, numbers: Sequence[int] = ()) -> list[JudgedTrial]:
    """Returns the trials of `queries.trial_rows` with the values that judge them."""
    rows, ends = queries.trial_rows(connection, study.id, numbers), finished(connection, study)
    return [_judged(row, ends.get(row.number)) for row in rows]


def _judged(row: AskedTrial, end: Finished | None) -> JudgedTrial:
    judged = JudgedTrial(*_columns(row))
    return judged if end is None else replace(judged, values=end.values, epoch=end.epoch, finished=end)


def judged(connection: Connection, study: StudyRow, rows: Sequence[JudgedTrial]) -> dict[int, queries.Judged]:
    """Returns trial id -> the step at which it was judged."""
    judged_of = queries.judged(connection, study, rows)
    for row in rows:
        if row.finished is not None and row.finished.trained_in:
            derived, number = queries.study_row(connection, row.finished.study), row.finished.number
            judged_rows = queries.judged(connection, derived, queries.trial_rows(connection, derived.id, [number]))
            judged_of |= dict(zip([row.id], judged_rows.values(), strict=False))
    return judged_of
