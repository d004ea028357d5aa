"""Holds a claimed trial while this process trains it: its lease, its reporter, its leftovers on disk and its end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hpo.ledger import Ledger, checkpoints, transactions
from hpo.ledger.claims import Claim, fenced, renewed
from hpo.ledger.history import Judgement
from hpo.ledger.leases import Heartbeat
from hpo.ledger.rows import Connection
from hpo.storage.home import Home
from hpo.workers.figures import Figures
from hpo.workers.reporter import LedgerReporter
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.checkpoint.store import CheckpointStore
from trainer.report import Outcome
from trainer.runtime.failpoint import failpoint


@dataclass(frozen=True)
class Holder:
    """The interface of a process for the trials that it holds.

    leaving      returns True once its trials are to end here
    worth_while  returns True while it is worth while to wait for other trials, by the seconds waited so far
    say          is called with a line when a trial begins and when it ends
    figures      measure this process
    """

    ledger: Ledger
    home: Home
    system: SystemMetrics = field(default_factory=SystemMetrics)
    leaving: Callable[[], bool] = lambda: False
    worth_while: Callable[[float], bool] = lambda waited: True
    say: Callable[[str], None] = lambda line: None
    figures: Figures = field(default_factory=Figures)


class TrialLeases:
    """Renews the leases of the trials that this process holds, all in one transaction, from its own thread.

    `name` is their name in errors; a trial is lost without a renewal for `seconds`.
    """

    def __init__(self, ledger: Ledger, name: str, seconds: float) -> None:
        self._ledger = ledger
        self._claims: dict[int, Claim] = {}
        self._lost: set[tuple[int, int]] = set()  # (trial, fence) of attempts that another one has replaced
        self._heartbeat = Heartbeat(name, self.renew, seconds / 3)

    def __enter__(self) -> TrialLeases:
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.close()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claim: Claim) -> None:
        self._claims[claim.trial_id] = claim

    def remove(self, claim: Claim) -> None:
        del self._claims[claim.trial_id]

    def check(self, claim: Claim) -> None:
        """Raises Fenced if the trial belongs to another attempt, and any error that has ended the thread."""
        self._heartbeat.check()
        if (claim.trial_id, claim.fence) in self._lost:
            raise fenced(claim)

    def renew(self) -> None:
        claims = list(self._claims.values())

        def body(connection: Connection) -> set[tuple[int, int]]:
            return {(claim.trial_id, claim.fence) for claim in claims if not renewed(connection, claim)}

        self._lost |= self._ledger.transact(body)


class HeldTrial:
    """A claimed trial held by this process, from its claim to its end."""

    opened: StudySession
    reporter: LedgerReporter

    def __init__(self, holder: Holder, claim: Claim, leases: TrialLeases) -> None:
        self.claim = claim
        self._holder, self._ledger, self._leases = holder, holder.ledger, leases
        leases.add(claim)

    def begin(self, opened: StudySession, how: str = "") -> LedgerReporter:
        """Returns the trial's reporter, which checks the lease and the process to see whether the trial may continue
        here."""
        holder, claim = self._holder, self.claim

        def preempted() -> bool:
            self._leases.check(claim)
            return holder.leaving()

        holder.say(f"{opened.name}: trial {claim.number} begins, attempt {claim.fence}{how}")
        self.opened = opened
        self.reporter = LedgerReporter(
            holder.ledger, holder.home, opened, claim, preempted, holder.system, holder.worth_while, holder.figures
        )
        return self.reporter

    def finish(self, outcome: Outcome) -> Outcome:
        """Judges the trial's value and ends the attempt. Returns the outcome after that; raises Fenced."""
        failpoint("worker.before_finish")
        recorded = self._ledger.transact(lambda connection: self._end(connection, outcome))
        failpoint("worker.after_finish")
        self._holder.say(
            f"{self.opened.name}: trial {self.claim.number} {recorded.kind}{recorded.error and ': '}{recorded.error}"
        )
        return recorded

    def _end(self, connection: Connection, outcome: Outcome) -> Outcome:
        if outcome.kind == "lost":
            transactions.lose(connection, self.claim.trial_id, self.claim.fence, outcome.error)
            return outcome
        judged = Judgement(outcome)
        waits = outcome.kind == "paused" and self.opened.resolved.stepped  # perhaps for good, so its values are kept
        if waits or outcome.kind in ("complete", "pruned"):
            judged = self.opened.curves.judge(connection, self.claim.trial_id, outcome)
            judged = replace(judged, outcome=outcome) if waits else judged
        transactions.finish(connection, self.claim, judged.outcome, judged.values, judged.violations)
        return judged.outcome

    def give_back(self, error: BaseException) -> None:
        """Lets the trial wait for another worker, since this process, its disk or its home is at fault."""
        give_back(self._ledger, self.claim, str(error))

    def sweep(self, store: CheckpointStore) -> None:
        """Removes files that this attempt saved and did not commit. A commit whose answer was lost may have
        succeeded."""
        store.sweep(self._ledger.look(lambda connection: checkpoints.committed_paths(connection, self.claim)))

    def release(self) -> None:
        """Ends the renewal of its lease."""
        self._leases.remove(self.claim)


@contextmanager
def holding(holder: Holder, claim: Claim) -> Generator[HeldTrial, None, None]:
    """Yields the trial, whose lease is renewed within the block."""
    with TrialLeases(holder.ledger, f"trial {claim.number}", claim.lease_seconds) as leases:
        yield HeldTrial(holder, claim, leases)


def give_back(ledger: Ledger, claim: Claim, error: str = "") -> None:
    """Lets a claimed trial wait for another worker."""
    left = Outcome("preempted", error=error)
    ledger.transact(lambda connection: transactions.finish(connection, claim, left, None))
