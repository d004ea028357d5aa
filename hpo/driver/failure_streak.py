"""Counts equal failures in a row, which end a study."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from hpo.declaration.budget import Budget
from hpo.declaration.user_code import own_part
from hpo.door import option
from hpo.driver.trial_rows import trained
from hpo.ledger.rows import ProposedTrial

MAX_EQUAL_FAILURES = 3  # in a row, with the same traceback
MAX_REFUSED = 20  # configurations in a row that the study's own rules refuse, so that no trial trains
MAX_UNTRAINED = 20  # trials in a row that complete no epoch, in a study without a bound of trials
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")  # the address of an object, which differs between processes


def _constant(error: str | None) -> str:
    """Returns a reason without the last output of the process, which differs between trials."""
    return (error or "").partition("; last:")[0]


class FailureStreak:
    """Counts three kinds of trials in a row, in the order of tells: failures with the same traceback; configurations
    that were refused; and, if `budget` does not bound the trials, trials that failed or were infeasible before their
    first epoch, since a bound of epochs would then never be reached. Trials below `forgiven` do not count."""

    def __init__(self, budget: Budget, forgiven: int, rows: Iterable[ProposedTrial] = ()) -> None:
        self.forgiven, self._endless = forgiven, budget.trials is None
        self.untrained = 0
        self.traces: list[str] = []
        self.shown = ""  # the newest traceback in full
        self.refusals: list[str] = []
        self.unreported = ""  # the reason why no trial could be judged
        for row in rows:
            self.note(row)

    def note(self, row: ProposedTrial) -> None:
        """Counts the end of a trial; a full streak stays full."""
        if row.number < self.forgiven or self.full:
            return
        in_vain = row.state in ("failed", "infeasible") and not trained(row)
        self.untrained = self.untrained + 1 if in_vain else 0
        if row.outcome == "refused":
            self.refusals = [*self.refusals, row.error or ""]
            return
        self.refusals = []
        if row.outcome == "unreported":
            self.unreported = row.error or ""
            return
        trace = {
            "user_error": row.traceback or _constant(row.error),
            "bad_config": row.error,
            "lost": _constant(row.error),  # the pids differ
        }.get(row.outcome or "")
        trace = _ADDRESS.sub("0x...", trace) if trace else None
        same = trace is not None and self.traces[-1:] == [trace]
        self.traces = [*self.traces, trace] if same and trace else [trace] if trace else []
        self.shown = row.traceback or row.error or ""

    def ahead(self, untold: Iterable[int], ended: Mapping[int, ProposedTrial]) -> FailureStreak:
        """Returns the streak including trials that have `ended`, by number, but are not yet told to the sampler.

        Returns this streak unless they fill it. An `untold` trial that still trains interrupts the count, since it may
        end differently.
        """
        streak = copy(self)
        for number in sorted(untold):
            if number in ended:
                streak.note(ended[number])
            elif not streak.full:
                streak.traces, streak.refusals, streak.untrained = [], [], 0
        return streak if streak.full else self

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
        vain = (
            f"{self.untrained} trials in a row ended before their first epoch, and no {option('trials')} bounds them:"
        )
        return f"{vain}\n{own_part(self.shown)}\n{resume}"


def adopted(
    budget: Budget, since: int, known: Sequence[ProposedTrial], told: Sequence[ProposedTrial] | None, anew: int | None
) -> FailureStreak:
    """Returns the streak of a driver that continues a study.

    It starts at trial `anew` if the user has resumed a study that failures had ended. Otherwise it counts the trials
    `known` at the last ask. Once nothing more is to be asked, it counts all trials in `told`, if they fill it.
    """
    if anew is not None:
        return FailureStreak(budget, anew)
    so_far = FailureStreak(budget, since, told or ())
    return so_far if so_far.full else FailureStreak(budget, since, known)
