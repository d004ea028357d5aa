"""A worker: claim -> rebuild the configuration -> trainer.fit -> finish. One warm process, many trials."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
from typing import Any

from sqlalchemy import select
from sqlalchemy.engine import Connection

from hpo.errors import HpoError, StorageError, UserError
from hpo.executors.base import WorkerContext
from hpo.executors.process import die_with_parent
from hpo.home import Home
from hpo.identity import check_worker
from hpo.ledger import Ledger, writes
from hpo.ledger.process import Process
from hpo.ledger.store import PATIENCE
from hpo.ledger.tables import studies
from hpo.ledger.writes import Claim
from hpo.reporter import LedgerReporter, Opened
from hpo.system import SystemMetrics
from trainer.errors import CheckpointError, ConfigError, DataError, Fenced, TrainerError
from trainer.failpoint import failpoint
from trainer.loop import fit  # and with it torch: a worker is ready before it claims
from trainer.report import Outcome

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
FENCED = 4  # exit code of a worker process that lost its trial to another


class Worker:
    """Claims trials one after another. `preempt`, safe in a signal handler, makes it checkpoint and leave."""

    def __init__(self, context: WorkerContext, executor: str) -> None:
        self._context = context
        self._ledger = Ledger(context.storage, create=False, patience=PATIENCE)
        self._process = Process.current()
        self._studies: dict[int, Opened] = {}
        self.leaving = threading.Event()
        self._ledger.transact(lambda c: writes.register(c, self._process, executor))
        self._lease = _Renewer(self._ledger, context.lease_timeout / 3)
        self._system = SystemMetrics()

    def run_one(self) -> bool:
        """Train one waiting trial to its end or its interruption; False if none waits."""
        study_id = self._context.study_id or None
        claimed = self._ledger.transact(lambda c: writes.claim(c, self._process.id, 1, study_id))
        if not claimed or self.leaving.is_set():
            for claim in claimed:
                self._finish(claim, Outcome("preempted"), None)
            return False
        failpoint("worker.after_claim")
        self._train(claimed[0])
        return True

    def preempt(self) -> None:
        self.leaving.set()

    def _preempted(self) -> bool:
        """Whether the fit should leave; raises Fenced if its trial is another's by now."""
        self._lease.check()
        return self.leaving.is_set()

    def close(self) -> None:
        self._lease.close()
        self._ledger.transact(lambda c: writes.unregister(c, self._process))
        self._ledger.close()

    def _train(self, claim: Claim) -> None:
        with self._lease.on(claim):
            try:
                opened = self._open(claim.study_id)
                reporter = LedgerReporter(
                    self._ledger, self._context.home, opened, claim, self._preempted, self._system
                )
                outcome = self._fit(opened, claim, reporter)
            except (CheckpointError, UserError) as error:
                # This place is at fault, its disk or its home, and not the trial: it waits for another worker.
                self._finish(claim, Outcome("preempted", error=str(error)), None)
                raise
            failpoint("worker.before_finish")
            self._finish(claim, outcome, opened)
            failpoint("worker.after_finish")

    def _open(self, study_id: int) -> Opened:
        if study_id not in self._studies:
            query = select(studies).where(studies.c.id == study_id)
            row = self._ledger.look(lambda connection: connection.execute(query).mappings().one())
            self._context.home.check_mark(row["name"], row["uid"], row["environment"]["host"])
            opened = Opened(dict(row))
            check_worker(dict(row), opened.study)
            self._studies[study_id] = opened
        return self._studies[study_id]

    def _fit(self, opened: Opened, claim: Claim, reporter: LedgerReporter) -> Outcome:
        store = reporter.store()
        try:
            config: Any = opened.study.rebuild(claim.config, claim.config_hash)
            task = opened.study.task_class()(config)
            outcome = task.fit(reporter, store) if hasattr(task, "fit") else fit(task, config.train, reporter, store)
            if not isinstance(outcome, Outcome):
                raise TypeError(f"fit() of {type(task).__name__} returned {outcome!r}: return a trainer.report.Outcome")
            return outcome
        except Fenced:
            store.sweep()  # what this attempt saved and could not commit
            raise
        except (CheckpointError, StorageError):
            raise
        except (ConfigError, DataError, UserError) as error:
            return Outcome("bad_config", error=str(error))
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise CheckpointError(f"the disk takes no more ({error}): free some space, then resume.") from error
            return _user_error(error)
        except (Exception, SystemExit) as error:  # a bug in the study's code; its whole traceback goes to the ledger
            return _user_error(error)

    def _finish(self, claim: Claim, outcome: Outcome, opened: Opened | None) -> None:
        def body(connection: Connection) -> None:
            final, values = outcome, None
            if opened is not None and outcome.kind in ("complete", "pruned"):
                final, values = opened.curves.judge(connection, claim.trial_id, outcome)
            writes.finish(connection, claim, final, values)

        self._ledger.transact(body)


def _user_error(error: BaseException) -> Outcome:
    return Outcome("user_error", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


class _Renewer:
    """Renews the lease of the trial at hand from a thread of its own, and finds out when it is lost."""

    def __init__(self, ledger: Ledger, period: float) -> None:
        self._ledger, self._period = ledger, period
        self._claim: Claim | None = None
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def on(self, claim: Claim) -> _Renewer:
        with self._lock:
            self._claim, self._lost = claim, None
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._claim = None

    def check(self) -> None:
        """Raise Fenced if the trial at hand is another's by now."""
        if self._lost is not None:
            raise Fenced(self._lost)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            with self._lock:
                claim = self._claim
            if claim is None:
                continue
            try:
                self._ledger.transact(lambda c, claim=claim: writes.renew(c, claim))
            except Fenced as error:
                with self._lock:
                    if self._claim is claim:
                        self._lost = str(error)
            except StorageError as error:
                # The training thread meets the same outage at its next report, and decides there.
                print(f"lease of trial {claim.number} not renewed: {error}", file=sys.stderr)


def serve(context: WorkerContext, executor: str, idle: float = 0.1) -> int:
    """Be a worker until asked to leave (SIGTERM, SIGINT); the process's exit code."""
    worker = Worker(context, executor)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.preempt())
    try:
        while not worker.leaving.is_set():
            if not worker.run_one():
                worker.leaving.wait(idle)
    except Fenced as error:
        print(f"fenced: {error}", file=sys.stderr)
        return FENCED
    except (HpoError, TrainerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    worker.close()
    return 0


def main() -> int:
    """The entry of a worker process that an executor has spawned."""
    die_with_parent()
    parser = argparse.ArgumentParser("hpo.worker")
    parser.add_argument("--home", required=True)
    parser.add_argument("--study-id", type=int, default=0)
    parser.add_argument("--executor", default="local")
    parser.add_argument("--lease-timeout", type=float, default=30.0)
    given = parser.parse_args()
    context = WorkerContext(os.environ["HPO_STORAGE"], Home.at(given.home), given.study_id, given.lease_timeout)
    return serve(context, given.executor)


if __name__ == "__main__":
    sys.exit(main())
