"""Counts equal failures in a row, which end a study."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import copy

from hpo.declaration.budget import Budget
from hpo.declaration.user_code import own_part
from hpo.ledger import driver_queries, queries
from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.transactions import REFUSED

MAX_EQUAL_FAILURES = 3  # in a row, with one and the same traceback
MAX_REFUSED = 20  # configurations in a row that the study's own rules refuse: no trial of them is trained
MAX_UNTRAINED = 20  # trials in a row that come to no epoch, where no number of trials ends the study
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")  # of an object: another one in every process
FORGIVEN = "failures_forgiven"  # the event of a resume after such an end


def _constant(error: str | None) -> str:
    """A reason without what it ends with: a process's last words, which differ from trial to trial."""
    return (error or "").partition("; last:")[0]


class FailureStreak:
    """The failures in a row, in the order of tells, that share one traceback, the configurations in a row that were
    refused and, where the `budget` has no bound of trials, which epochs then never reach, the trials in a row that
    failed or were infeasible before their first epoch; trials below `forgiven` do not count."""

    def __init__(self, budget: Budget, forgiven: int, rows: Iterable[RowMapping] = ()) -> None:
        self.forgiven, self._endless = forgiven, budget.trials is None
        self.untrained = 0
        self.traces: list[str] = []
        self.shown = ""  # the newest of them in full
        self.refusals: list[str] = []
        self.unreported = ""  # why no trial could be judged
        for row in rows:
            self.note(row)

    def note(self, row: RowMapping) -> None:
        """Take in how a trial ended; once the streak is full it stays so."""
        if row["number"] < self.forgiven or self.full:
            return
        in_vain = row["state"] in ("failed", "infeasible") and not driver_queries.trained(row)
        self.untrained = self.untrained + 1 if in_vain else 0
        if row["outcome"] == REFUSED:
            self.refusals = [*self.refusals, row["error"]]
            return
        self.refusals = []
        if row["outcome"] == "unreported":
            self.unreported = row["error"]
            return
        trace = {
            "user_error": row["traceback"] or _constant(row["error"]),
            "bad_config": row["error"],
            "lost": _constant(row["error"]),  # each by another pid
        }.get(row["outcome"])
        trace = _ADDRESS.sub("0x...", trace) if trace else None
        same = trace is not None and self.traces[-1:] == [trace]
        self.traces = [*self.traces, trace] if same and trace else [trace] if trace else []
        self.shown = row["traceback"] or row["error"] or ""

    def ahead(self, untold: Iterable[int], ended: Mapping[int, RowMapping]) -> FailureStreak:
        """The streak that trials which have ended, by number, fill although the sampler is not told of them yet; itself
        where they do not. One of the `untold` that still trains parts those before it from those after it, since it may
        end otherwise."""
        found = copy(self)
        for number in sorted(untold):
            if number in ended:
                found.note(ended[number])
            elif not found.full:
                found.traces, found.refusals, found.untrained = [], [], 0
        return found if found.full else self

    @property
    def full(self) -> bool:
        equal, refused = len(self.traces) >= MAX_EQUAL_FAILURES, len(self.refusals) >= MAX_REFUSED
        return bool(self.unreported) or equal or refused or (self._endless and self.untrained >= MAX_UNTRAINED)

    def explain(self, resume: str) -> str:
        if self.unreported:
            return f"{self.unreported}\n{resume}"
        if len(self.refusals) >= MAX_REFUSED:
            refused = f"{len(self.refusals)} configurations in a row were refused, as no such can be:"
            return f"{refused}\n{self.refusals[-1]}\n{resume}"
        if len(self.traces) >= MAX_EQUAL_FAILURES:
            return f"{len(self.traces)} trials in a row failed in the same way:\n{own_part(self.shown)}\n{resume}"
        vain = f"{self.untrained} trials in a row ended before their first epoch, and no --trials bounds them:"
        return f"{vain}\n{own_part(self.shown)}\n{resume}"


def forgiven(connection: Connection, study_id: int) -> int:
    """The number of the first trial whose failure counts: the user has resumed the study after those before it."""
    fields = queries.newest_event(connection, study_id, FORGIVEN)
    return fields["first"] if fields else 0
