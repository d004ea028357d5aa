"""A worker: claims a trial, rebuilds its configuration, calls trainer.fit and finishes it, one trial after another.
One warm process, many trials."""

from __future__ import annotations

if __name__ == "__main__":
    from hpo.child_process import die_with_parent

    die_with_parent()  # before torch, whose import takes seconds in which the parent may die

import argparse
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from hpo.child_process import AFRESH, FAULT
from hpo.declaration.identity import check_loaded, check_worker
from hpo.declaration.preflight import check_torch
from hpo.errors import HpoError, UserError
from hpo.ledger import Ledger, queries, transactions
from hpo.ledger.changes import Changes
from hpo.ledger.claims import Claim, any_waiting, claim, renew
from hpo.ledger.history import Judgement
from hpo.ledger.leases import Heartbeat
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection
from hpo.ledger.store import PATIENCE
from hpo.space.trial_config import TrialShape
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.workers import ranks
from hpo.workers.attempt import attempt
from hpo.workers.executors.resources import keep_to_share
from hpo.workers.lanes import LaneGroup, WorkerServices
from hpo.workers.process import WorkerProcess
from hpo.workers.reporter import LedgerReporter
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import CheckpointError, Fenced, TrainerError
from trainer.metrics.progress import Display
from trainer.redaction import redacted
from trainer.report import Outcome
from trainer.runtime.failpoint import failpoint

SHOWN_EVERY = 10.0  # seconds
REST = 0.5  # seconds after which a worker that nothing waits for asks again which studies it is to serve
FENCED = 4  # exit code of a worker process that lost its trial to another


class Worker:
    """Claims trials one after another. `preempt`, safe in a signal handler, makes it checkpoint and leave.

    `say` is told, in a line each, of the trials it takes and how they end; `show`, every ten seconds and at its end, in
    a line how the one that it trains is getting on. At a rung a trial waits for those before it while that is
    `worth_while` in its study after so many seconds: while a driver takes trials back from the dead.
    """

    def __init__(
        self,
        ledger: Ledger,
        home: Home,
        executor: str,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[str], None] | None = None,
        worth_while: Callable[[int, float], bool] = lambda study_id, waited: True,
    ) -> None:
        self._ledger, self._home, self._say, self._show = ledger, home, say, show
        self._worth_while = worth_while
        self._process = Process.current()
        self._studies: dict[int, tuple[dict[str, Any], StudySession]] = {}  # each as its row was then
        self._ledger.transact(lambda c: transactions.register(c, self._process, executor))
        self._changes = Changes(ledger)
        self._system = SystemMetrics()
        self.state = WorkerProcess(ledger, shared=executor == "inline")
        self.leaving = False  # no Event: a handler that sets one while this thread waits for it may wait forever
        self.trained = 0  # trials it has taken

    def run_one(self, among: Collection[int]) -> bool:
        """Train one waiting trial of these studies to its end or its interruption; False if none waits."""
        token = uuid.uuid4().hex
        claimed = self._ledger.transact(lambda c: claim(c, self._process.id, token, among))
        if not claimed or self.leaving:
            for taken in claimed:
                self._finish(taken, Outcome("preempted"), None)
            return False
        failpoint("worker.after_claim")
        (self._train_lanes if TrialShape.of(claimed[0].config).lanes > 1 else self._train)(claimed[0])
        return True

    def rest(self, among: Collection[int]) -> None:
        """Wait until a trial of these studies waits, for REST seconds at most."""
        end = time.monotonic() + REST
        while (left := end - time.monotonic()) > 0 and not self.leaving:
            written = self._changes.wait(left, self._sleep)
            if written and among and self._ledger.look(lambda c: any_waiting(c, among)):
                return

    def preempt(self) -> None:
        self.leaving = True

    def _sleep(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.leaving

    def close(self) -> None:
        """Say that it leaves in good order. The ledger stays open."""
        self.state.close()
        self._changes.close()
        self._ledger.transact(lambda c: transactions.unregister(c, self._process))

    def _train(self, taken: Claim) -> None:
        self.trained += 1

        def renew_lease() -> None:
            self._ledger.transact(lambda c: renew(c, taken))

        with Heartbeat(f"trial {taken.number}", renew_lease, taken.lease_seconds / 3) as heartbeat:

            def preempted() -> bool:
                heartbeat.check()
                return self.leaving

            try:
                opened = self._open(taken.study_id)
                self._say(f"{opened.name}: trial {taken.number} begins, attempt {taken.fence}")
                asked = (self._ledger, self._home, opened, taken, preempted, self._system)
                reporter = LedgerReporter(*asked, partial(self._worth_while, taken.study_id))
                outcome = reporter.obeyed(self._fit(opened, taken, reporter))
            except (CheckpointError, UserError) as error:
                # This place is at fault, its disk or its home, and not the trial: it waits for another worker.
                self._finish(taken, Outcome("preempted", error=str(error)), None)
                raise
            failpoint("worker.before_finish")
            ended = self._finish(taken, outcome, opened)
            failpoint("worker.after_finish")
        self._say(f"{opened.name}: trial {taken.number} {ended.kind}{ended.error and ': '}{ended.error}")

    def _train_lanes(self, first: Claim) -> None:
        """Train the trial and others like it as lanes of one model."""
        worth_while = partial(self._worth_while, first.study_id)
        services = WorkerServices(
            ledger=self._ledger,
            home=self._home,
            worker_id=self._process.id,
            system=self._system,
            leaving=lambda: self.leaving,
            worth_while=worth_while,
            keep=partial(self.state.trial, first.study_id, first.number),
            finish=self._finish,
            say=self._say,
        )
        group = LaneGroup(services, first)
        try:
            group.train(partial(self._open, first.study_id))
        finally:
            self.trained += group.taken

    def _open(self, study_id: int) -> StudySession:
        """The study as it is driven now, anew where a resume has changed it; DriftError where its code is new."""
        row = dict(self._ledger.look(lambda connection: queries.study_by_id(connection, study_id)))
        with self.state.loading(study_id):
            if study_id in self._studies:
                before, opened = self._studies[study_id]
                if all(before[part] == row[part] for part in ("spec", "identity")):
                    return opened
                check_loaded(before, row)
            locations.check(self._home, row)
            opened = StudySession(row)
            check_torch(opened.study)
            check_worker(row, opened.study)
        self._studies[study_id] = (row, opened)
        return opened

    def _fit(self, opened: StudySession, taken: Claim, reporter: LedgerReporter) -> Outcome:
        store = reporter.store()
        reporter.sweep_files()
        try:
            alone = TrialShape.of(taken.config).ranks == 1
            if alone:
                with self.state.trial(taken.study_id, taken.number):
                    outcome = attempt(opened.study, self._home, taken, reporter, store, self._display(taken.number))
            else:
                outcome = ranks.train(self._ledger.url, self._home, taken, lambda: reporter.preempted)
        except Fenced:
            self._sweep(store, taken)
            raise
        if not alone or outcome.kind == "user_error":
            self._sweep(store, taken)  # what was being saved when it broke off, or when a rank ended it for all
        return outcome

    def _display(self, number: int) -> Display | None:
        show = self._show
        return Display(lambda text: show(f"trial {number}: {text}"), SHOWN_EVERY) if show else None

    def _sweep(self, store: CheckpointStore, taken: Claim) -> None:
        """Remove what this attempt saved and did not commit; a commit may have gone through whose answer was lost."""
        store.sweep(self._ledger.look(lambda connection: transactions.committed_paths(connection, taken)))

    def _finish(self, taken: Claim, outcome: Outcome, opened: StudySession | None) -> Outcome:
        """End the attempt; how it ended once its value was judged."""

        def body(connection: Connection) -> Outcome:
            if outcome.kind == "lost":
                transactions.lose(connection, taken.trial_id, taken.fence, outcome.error)
                return outcome
            judged = Judgement(outcome)
            if opened is not None and outcome.kind in ("complete", "pruned"):
                judged = opened.curves.judge(connection, taken.trial_id, outcome)
            transactions.finish(connection, taken, judged.outcome, judged.values, judged.violations)
            return judged.outcome

        return self._ledger.transact(body)


def serve(worker: Worker, among: Callable[[], Collection[int] | None]) -> int:
    """Train what waits in the studies `among` gives until it gives None or `preempt` was called; the exit code, AFRESH
    where another process is to go on.

    Raises HpoError and TrainerError where this process, and not a trial, is at fault.
    """
    try:
        while not (worker.leaving or worker.state.spent) and (found := among()) is not None:
            if not found or not worker.run_one(found):
                worker.rest(found)
    except Fenced as error:
        print(f"fenced: {error}", file=sys.stderr)
        return FENCED
    worker.close()
    if worker.state.spent and not worker.leaving:
        print(f"another worker begins: a trial changed {worker.state.lasting}", file=sys.stderr)
        return AFRESH
    return 0


def main() -> int:
    """The entry of a worker process that an executor has spawned."""
    parser = argparse.ArgumentParser("hpo.workers.worker")
    parser.add_argument("--home", required=True)
    parser.add_argument("--study-id", type=int, required=True)
    parser.add_argument("--executor", required=True)
    given = parser.parse_args()
    try:
        keep_to_share()
        ledger = Ledger(os.environ["HPO_STORAGE"], create=False, patience=PATIENCE)
        home = Home.at(given.home)
        worker = Worker(ledger, home, given.executor)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.preempt())
        with home.keeping():
            return serve(worker, lambda: [given.study_id])
    except (HpoError, TrainerError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException:  # of a study's code too, which may raise anything
        print(redacted(traceback.format_exc()), file=sys.stderr)
    return FAULT


if __name__ == "__main__":
    sys.exit(main())
