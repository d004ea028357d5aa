"""Holds a study that a worker has opened."""

from __future__ import annotations

from hpo.declaration.resolved import ResolvedStudy
from hpo.ledger.claims import Claim
from hpo.ledger.history import Curves
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.strategy_history import LedgerHistory


class StudySession:
    """A study that a worker has loaded once and uses for many trials."""

    def __init__(self, row: StudyRow) -> None:
        self.row = row
        self.id, self.name = row.id, row.name
        self.resolved = ResolvedStudy.stored(row.spec.json)
        self.study = self.resolved.study
        self.curves = Curves(self.id, self.study.objectives, self.study.constraints, bounded=self.resolved.bounded)

    def history(self, connection: Connection, claim: Claim, epoch: int) -> LedgerHistory:
        """Returns the history that a decision on the trial may read.

        In ordered mode it has the trials <= number - W, and the values of all earlier trials at one epoch.
        """
        spec = self.resolved.spec
        limit = claim.number - spec.window if spec.order == "ordered" else None
        return LedgerHistory(self.curves, connection, claim.trial_id, claim.number, epoch, limit)
