"""Counts equal failures in a row, which end a study."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpo.declaration.user_code import own_part
from hpo.ledger import queries
from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.transactions import REFUSED

MAX_EQUAL_FAILURES = 3  # in a row, with one and the same traceback
MAX_REFUSED = 20  # configurations in a row that the study's own rules refuse: no trial of them is trained
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")  # of an object: another one in every process
FORGIVEN = "failures_forgiven"  # the event of a resume after such an end


def _constant(error: str | None) -> str:
    """A reason without what it ends with: a process's last words, which differ from trial to trial."""
    return (error or "").partition("; last:")[0]


class FailureStreak:
    """The failures in a row, in the order of tells, that share one traceback, and the configurations in a row that were
    refused; trials below `forgiven` do not count."""

    def __init__(self, forgiven: int, rows: Iterable[RowMapping] = ()) -> None:
        self.forgiven = forgiven
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
        if row["outcome"] == REFUSED:
            self.refusals.append(row["error"])
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
        found = FailureStreak(self.forgiven)
        found.traces, found.refusals, found.unreported = [*self.traces], [*self.refusals], self.unreported
        found.shown = self.shown
        for number in sorted(untold):
            if number in ended:
                found.note(ended[number])
            elif not found.full:
                found.traces, found.refusals = [], []
        return found if found.full else self

    @property
    def full(self) -> bool:
        return (
            bool(self.unreported) or max(len(self.traces) / MAX_EQUAL_FAILURES, len(self.refusals) / MAX_REFUSED) >= 1
        )

    def explain(self, resume: str) -> str:
        if self.unreported:
            return f"{self.unreported}\n{resume}"
        if len(self.refusals) >= MAX_REFUSED:
            refused = f"{len(self.refusals)} configurations in a row were refused, as no such can be:"
            return f"{refused}\n{self.refusals[-1]}\n{resume}"
        return f"{len(self.traces)} trials in a row failed in the same way:\n{own_part(self.shown)}\n{resume}"


def forgiven(connection: Connection, study_id: int) -> int:
    """The number of the first trial whose failure counts: the user has resumed the study after those before it."""
    fields = queries.newest_event(connection, study_id, FORGIVEN)
    return fields["first"] if fields else 0
