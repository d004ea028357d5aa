"""What a study's driver reads and writes besides the trials it asks for and tells."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import bindparam, select, update
from sqlalchemy.engine import Connection, RowMapping

from hpo.ledger import statements as sql
from hpo.ledger.tables import OPEN_STATES, TERMINAL_STATES, asks, studies, trials

PAGE = 500  # rows read at once: SQLite takes 32766 parameters

COUNT_TIME = update(studies).where(studies.c.id == bindparam("study")).values(seconds_used=bindparam("used"))

ALL = (
    select(trials, asks.c.coordinates, asks.c.params, asks.c.trial_attrs, asks.c.study_attrs)
    .join(asks, asks.c.trial_id == trials.c.id)
    .where(trials.c.study_id == bindparam("study"))
    .order_by(trials.c.number)
)

_SOME = ALL.where(trials.c.number.in_(bindparam("numbers", expanding=True)))

# Number and state of the trials that nobody trains or is to train, but for those told.
HALTED = select(trials.c.number, trials.c.state).where(
    trials.c.study_id == bindparam("study"),
    trials.c.number >= bindparam("first"),
    trials.c.state.in_(("paused", *TERMINAL_STATES)),
    trials.c.told.is_(None),
)

CONFIGS = (
    select(trials.c.number, asks.c.config)
    .join(asks, asks.c.trial_id == trials.c.id)
    .where(trials.c.study_id == bindparam("study"), trials.c.state.in_(OPEN_STATES))
)


def rows(connection: Connection, study_id: int, numbers: Sequence[int]) -> list[RowMapping]:
    """The trials of these numbers, each with what was asked."""
    pages = (numbers[start : start + PAGE] for start in range(0, len(numbers), PAGE))
    where = ({"study": study_id, "numbers": list(page)} for page in pages)
    return [row for one in where for row in connection.execute(_SOME, one).mappings()]


def thaw(connection: Connection, study_id: int, numbers: Sequence[int]) -> None:
    """Let paused trials wait for a worker again; what is not paused stays as it is."""
    connection.execute(sql.THAW, {"study": study_id, "numbers": list(numbers)})


def retire(connection: Connection, trial_id: int, values: Sequence[float | None] | None) -> None:
    """End a paused trial as pruned; what is not paused stays as it is."""
    ended = {"trial": trial_id, "new_values": None if values is None else list(values), "ended": time.time()}
    connection.execute(sql.RETIRE, ended)
