"""Runs a worker: claims a trial, rebuilds its configuration, calls trainer.fit and finishes it, one after another.

One warm process trains many trials.
"""

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
from types import FrameType
from typing import TYPE_CHECKING

from hpo.child_process import AFRESH, FAULT
from hpo.declaration.identity import check_loaded, check_worker
from hpo.declaration.preflight import check_torch
from hpo.errors import HpoError, UserError
from hpo.ledger import Ledger, queries, quotas, worker_rows
from hpo.ledger.claims import Claim, any_news, claim
from hpo.ledger.database.changes import POLL, Changes
from hpo.ledger.process_id import Process
from hpo.secret_environment import withheld
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.workers import ranks
from hpo.workers.attempt import attempt
from hpo.workers.executors.resources import keep_to_share
from hpo.workers.figures import Figures
from hpo.workers.held_trial import HeldTrial, Holder, give_back, holding
from hpo.workers.lanes import LaneGroup
from hpo.workers.process import WorkerProcess
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.errors import CheckpointError, Fenced, TrainerError
from trainer.files import outage
from trainer.metrics.progress import Display
from trainer.quote import in_one_line
from trainer.redaction import redacted
from trainer.report import Outcome
from trainer.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from trainer.distributed.nodes import Nodes

SHOWN_EVERY = 10.0  # seconds
REST = 0.5  # seconds after which an idle worker asks again which studies to serve
FENCED = 4  # exit code of a worker process that lost its trial to another


class Worker:
    """Claims trials one after another. `preempt`, safe in a signal handler, makes it checkpoint and leave.

    `say(line)` is called when a trial begins and when it ends; `show(line)` every ten seconds, and at the trial's end,
    with its progress. At a rung a trial waits for earlier trials as long as `worth_while(study_id, seconds waited)` is
    True: while a driver reclaims trials of dead workers. Trials of several ranks are shared with `nodes`, if there are
    any. `figures` measure the worker.
    """

    def __init__(
        self,
        ledger: Ledger,
        home: Home,
        executor: str,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[str], None] | None = None,
        worth_while: Callable[[int, float], bool] = lambda study_id, waited: True,
        nodes: Nodes | None = None,
        figures: Figures | None = None,
    ) -> None:
        self._figures = figures or Figures()
        self._ledger, self._home, self._say, self._show, self._nodes = ledger, home, say, show, nodes
        self._worth_while = worth_while
        self._process = Process.current()
        self._studies: dict[int, StudySession] = {}  # each with its row when it was opened
        self._ledger.transact(lambda c: worker_rows.register(c, self._process, executor))
        self._changes = Changes(ledger)
        self._system = SystemMetrics()
        self.state = WorkerProcess(ledger, shared=executor == "inline")
        self.leaving = False  # not an Event: a handler that sets one while this thread waits for it may wait forever
        self.trained = 0  # number of trials it has taken
        self._said: set[str] = set()

    def run_one(self, among: Collection[int]) -> bool:
        """Trains one waiting trial of these studies to its end or its interruption; returns False if none waits."""
        token = uuid.uuid4().hex
        claimed = self._ledger.transact(lambda c: claim(c, self._process.id, token, among))
        if not claimed or self.leaving:
            for taken in claimed:
                give_back(self._ledger, taken)
            if not self.leaving:
                self._name_quotas(among)
            return False
        failpoint("worker.after_claim")
        self._figures.enter("training")
        with withheld():
            (self._train_lanes if claimed[0].shape.lanes > 1 else self._train)(claimed[0])
        return True

    def rest(self, among: Collection[int]) -> None:
        """Sleeps until a trial of these studies waits, or one of them has ended, for a while at most."""
        self._figures.enter("no_trial" if among else "no_study")
        end = time.monotonic() + (REST if self._ledger.is_sqlite else POLL)
        while (left := end - time.monotonic()) > 0 and not self.leaving:
            written = self._changes.wait(left, self._sleep)
            if written and among and self._ledger.look(lambda c: any_news(c, among)):
                return

    def preempt(self) -> None:
        self.leaving = True

    def _name_quotas(self, among: Collection[int]) -> None:
        """Says once which quotas keep trials of these studies waiting."""
        for text in self._ledger.look(lambda c: quotas.exhausted(c, among)):
            if text not in self._said:
                self._said.add(text)
                print(text, file=sys.stderr)

    def _sleep(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.leaving

    def close(self) -> None:
        """Records that it leaves in good order. The ledger stays open."""
        self.state.close()
        self._changes.close()
        self._ledger.transact(lambda c: worker_rows.unregister(c, self._process))

    def _train(self, claim: Claim) -> None:
        self.trained += 1
        with holding(self._holder(claim.study_id), claim) as trial:
            try:
                reporter = trial.begin(self._open(claim.study_id))
                outcome = reporter.obeyed(self._fit(trial))
            except (CheckpointError, UserError) as error:
                trial.give_back(error)
                raise
            trial.finish(outcome)

    def _train_lanes(self, first: Claim) -> None:
        """Trains the trial and similar ones as lanes of one model."""
        group = LaneGroup(self._holder(first.study_id), self._process.id, self.state, first)
        try:
            group.train(partial(self._open, first.study_id))
        finally:
            self.trained += group.taken

    def _holder(self, study_id: int) -> Holder:
        worth_while = partial(self._worth_while, study_id)
        return Holder(
            self._ledger, self._home, self._system, lambda: self.leaving, worth_while, self._say, self._figures
        )

    def _open(self, study_id: int) -> StudySession:
        """Returns the study in its current form, opened again if a resume has changed it.

        Raises DriftError if its code is new.
        """
        row = self._ledger.look(lambda connection: queries.study_by_id(connection, study_id))
        with self.state.loading(study_id):
            if study_id in self._studies:
                opened = self._studies[study_id]
                if (opened.row.spec, opened.row.identity) == (row.spec, row.identity):
                    return opened
                check_loaded(row.name, opened.row.identity, row.identity)
            locations.check(self._home, row)
            opened = StudySession(row)
            check_torch(opened.study)
            check_worker(opened.resolved, row.identity, row.environment)
        self._studies[study_id] = opened
        return opened

    def _fit(self, trial: HeldTrial) -> Outcome:
        claim, reporter = trial.claim, trial.reporter
        store = reporter.store()
        reporter.sweep_files()
        try:
            in_this_process = claim.shape.ranks == 1
            if in_this_process:
                with self.state.trial(claim.study_id, claim.number):
                    display = self._display(claim.number)
                    outcome = attempt(trial.opened.study, self._home, claim, reporter, store, display)
            else:
                outcome = ranks.train(self._ledger.url, self._home, claim, lambda: reporter.preempted, self._nodes)
        except Fenced:
            trial.sweep(store)
            raise
        if not in_this_process or outcome.kind == "user_error":
            trial.sweep(store)  # saves that were interrupted, or that a rank ended for all
        return outcome

    def _display(self, number: int) -> Display | None:
        show = self._show
        return Display(lambda text: show(f"trial {number}: {text}"), SHOWN_EVERY) if show else None


def serve(worker: Worker, among: Callable[[], Collection[int] | None]) -> int:
    """Trains waiting trials of the studies that `among` returns until it returns None or `preempt` was called.

    Returns the exit code, AFRESH if another process is to go on. Raises HpoError and TrainerError if this process, and
    not a trial, is at fault.
    """
    try:
        while not (worker.leaving or worker.state.spent) and (study_ids := among()) is not None:
            if not study_ids or not worker.run_one(study_ids):
                worker.rest(study_ids)
    except Fenced as error:
        print(f"fenced: {error}", file=sys.stderr)
        return FENCED
    worker.close()
    if worker.state.spent and not worker.leaving:
        print(f"another worker begins: a trial changed {worker.state.lasting}", file=sys.stderr)
        return AFRESH
    return 0


def main() -> int:
    """Runs a worker process that an executor has spawned; returns the exit code."""
    parser = argparse.ArgumentParser("hpo.workers.worker")
    parser.add_argument("--home", required=True)
    parser.add_argument("--study-id", type=int, required=True)
    parser.add_argument("--executor", required=True)
    options = parser.parse_args()
    try:
        keep_to_share()
        ledger = Ledger(os.environ["HPO_STORAGE"], create=False)
        home = Home.at(options.home)
        worker = Worker(ledger, home, options.executor)

        def leave(number: int, _: FrameType | None) -> None:
            worker.preempt()
            outage.leave_soon()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        with home.keeping():
            return serve(worker, lambda: [options.study_id])
    except (HpoError, TrainerError) as error:
        print(f"error: {in_one_line(str(error))}", file=sys.stderr)
        return outage.EXIT_CODE if getattr(error, "exit_code", 1) == outage.EXIT_CODE else FAULT
    except BaseException:  # also from a study's code, which may raise anything
        print(redacted(traceback.format_exc()), file=sys.stderr)
    return FAULT


if __name__ == "__main__":
    sys.exit(main())
