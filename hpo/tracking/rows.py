"""Reads the rows of many trials' runs in one query per table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpo.ledger import queries, tags
from hpo.ledger.read import by_trial
from hpo.ledger.rows import Connection, StudyRow, UnsentTrial
from hpo.ledger.views import mirror as mirror_queries
from hpo.space.trial_state import TERMINAL_STATES

LARGEST = 1.7976931348623157e308  # the value that MLflow stores for an infinity


class Facts:
    """The rows that belong to some trials, read in one query per table."""

    def __init__(self, connection: Connection, tracker: str, study: StudyRow, rows: Sequence[UnsentTrial]) -> None:
        ids = [row.id for row in rows]
        self.values = mirror_queries.values(connection, tracker, ids)
        self.reported = mirror_queries.last_reports(connection, ids)
        self.checkpoints = mirror_queries.all_checkpoints(connection, ids)
        events = mirror_queries.shown_events(connection, ids)
        self.artifacts = by_trial(row for row in events if row.kind == "artifact")
        self.shrunk = by_trial(row for row in events if "micro_batch_size" in row.fields)
        self.tags = tags.every(connection, study.id, [row.number for row in rows])
        self.preemptions = mirror_queries.preemptions(connection, ids)
        over = [row for row in rows if row.state in TERMINAL_STATES]
        ended_ids = [row.id for row in over]
        saved = [trial for trial in ended_ids if trial in self.checkpoints]
        self.last, self.judged = queries.last_values(connection, ended_ids), queries.judged(connection, study, over)
        self.saved = mirror_queries.saved_values(connection, saved) if saved else {}
        pruned = [row.id for row in rows if row.state == "pruned"]
        self.stops = mirror_queries.stops(connection, pruned) if pruned else {}
        odd = [trial for trial, values in self.values.items() if any(not finite(row.value) for row in values)]
        self.nonfinite = mirror_queries.nonfinite(connection, odd, LARGEST) if odd else {}


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
