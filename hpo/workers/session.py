"""Holds a study that a worker has opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.declaration.references import load
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.ledger.claims import Claim
from hpo.ledger.history import Curves, LedgerHistory
from hpo.ledger.rows import Connection
from hpo.search.strategies.base import has_rungs, make_strategy


class StudySession:
    """A study as a worker holds it: loaded once, used for many trials."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.id: int = row["id"]
        self.name: str = row["name"]
        self.spec = StudySpec.from_json(row["spec"])
        self.study: Study = load(self.spec.reference).configure(self.spec.overrides)
        self.strategy = make_strategy(self.spec.strategy)
        bounded = has_rungs(self.strategy)
        self.curves = Curves(self.id, self.study.objectives, self.study.constraints, bounded=bounded)

    def history(self, connection: Connection, claim: Claim, epoch: int) -> LedgerHistory:
        """What a decision on the trial may read: in ordered mode the trials <= number - W, and of all before it what
        they had at one epoch."""
        limit = claim.number - self.spec.window if self.spec.order == "ordered" else None
        return LedgerHistory(self.curves, connection, claim.trial_id, claim.number, epoch, limit)
