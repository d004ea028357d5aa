"""Holds a study that a worker has opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.declaration.resolved import ResolvedStudy
from hpo.ledger.claims import Claim
from hpo.ledger.history import Curves, LedgerHistory
from hpo.ledger.rows import Connection


class StudySession:
    """A study as a worker holds it: loaded once, used for many trials."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.id: int = row["id"]
        self.name: str = row["name"]
        self.resolved = ResolvedStudy.stored(row["spec"])
        self.study = self.resolved.study
        self.curves = Curves(self.id, self.study.objectives, self.study.constraints, bounded=self.resolved.bounded)

    def history(self, connection: Connection, claim: Claim, epoch: int) -> LedgerHistory:
        """What a decision on the trial may read: in ordered mode the trials <= number - W, and of all before it what
        they had at one epoch."""
        spec = self.resolved.spec
        limit = claim.number - spec.window if spec.order == "ordered" else None
        return LedgerHistory(self.curves, connection, claim.trial_id, claim.number, epoch, limit)
