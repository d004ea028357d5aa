"""Runs a worker that was started by hand: chooses its studies, and decides when it leaves."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING

from hpo.child_process import AFRESH
from hpo.clock import Clock, SystemClock
from hpo.errors import UserError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import Connection, LeaseRow, StudyRow
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.storage.metrics_text import exposed
from hpo.storage.probes import answering
from hpo.terminal import print, urgent
from hpo.text import counted
from hpo.workers.figures import Figures
from hpo.workers.nodes import check_complete, follow, of_torchrun
from trainer.errors import CheckpointError
from trainer.files import outage
from trainer.files.s3 import Away

if TYPE_CHECKING:
    from trainer.distributed.nodes import Nodes

ENDED = ("complete", "stopped", "removing")  # states of a study that nobody drives before someone begins it again
LOOK = 1.0  # seconds between looks at which studies are driven


class JoinableStudies:
    """The studies a worker may train for: those of its own home that are driven, one or all.

    A study is driven while the holder of its driver's lease is not known to be dead and has renewed it within the
    lease's time on this process's own clock. A call returns the studies' ids, or None when it is time to leave: all
    that were driven have ended or lost their driver. Until one is driven, it returns no ids. With `stay` the worker
    waits for the next driver: of the study it names, which need not exist yet, until that has ended, else for ever.
    """

    def __init__(
        self, ledger: Ledger, home: Home, study: str | None, clock: Clock | None = None, *, stay: bool = False
    ) -> None:
        self._ledger, self._home, self._study, self._stay = ledger, home, study, stay
        self._clock = clock or SystemClock()
        # study -> (fence, renewals), since when, and when that was looked at last
        self._seen: dict[int, tuple[tuple[int, int], float, float]] = {}
        self._joined: dict[int, str] = {}
        self._said: set[str] = set()
        idle = f"study {study} is not driven" if study else "no study of this home is driven"
        self._idle = f"{idle}: waiting for `hpo run` or `hpo resume`"
        self._found: list[int] = []
        self._next_look = self._clock.monotonic()
        if study is not None and not stay:
            ledger.look(lambda connection: queries.study_row(connection, study))  # raises if it does not exist

    def __call__(self) -> list[int] | None:
        if self._clock.monotonic() < self._next_look:
            return self._found
        self._next_look = self._clock.monotonic() + LOOK
        rows = [row for row in self._ledger.look(self._open_studies) if self._is_mine(*row) and not self._silent(*row)]
        for study, lease in rows:
            self._said.discard(self._idle)
            if study.id not in self._joined:
                self._joined[study.id] = study.name
                say(f"joined study {study.name}, which pid {lease.pid} on {lease.host} drives")
        self._found = [study.id for study, _ in rows]
        if rows:
            return self._found
        if self._joined and not self._stay:
            return None
        self._joined.clear()
        state, idle = self._ledger.look(self._standing)
        if state in ENDED:
            say(f"study {self._study} is {state}: there is nothing to train")
            return None
        self._say_once(idle)
        return self._found

    def _open_studies(self, connection: Connection) -> list[tuple[StudyRow, LeaseRow]]:
        """Returns open studies that have trials, each with its driver's lease, if the holder is not known to be
        dead."""
        lease_of = leases.holders(connection)
        rows: list[tuple[StudyRow, LeaseRow]] = []
        for study in queries.asked_for(connection, self._study):  # the driver marks its home before it asks
            lease = lease_of.get(f"driver:{study.id}")
            if lease and not is_dead(lease.host, lease.pid, lease.pid_started):
                rows.append((study, lease))
        return rows

    def _standing(self, connection: Connection) -> tuple[str, str]:
        """Returns the state of the study that was named, empty if there is none, and why nothing can be trained now."""
        if self._study is None:
            return "", self._idle
        try:
            return queries.study_row(connection, self._study).state, self._idle
        except UserError as error:  # the name is wrong, or its study begins later
            return "", f"{str(error).rstrip('.')}: waiting for it"

    def _silent(self, study: StudyRow, lease: LeaseRow) -> bool:
        token, now = (lease.fence, lease.renewals), self._clock.monotonic()
        seen, since, looked = self._seen.get(study.id, (None, now, now))
        # After a long pause this process was busy, or the ledger was away and the driver could not renew either.
        since = since if seen == token and now - looked <= study.lease_seconds / 2 else now
        self._seen[study.id] = token, since, now
        return now - since >= study.lease_seconds

    def _is_mine(self, study: StudyRow, lease: LeaseRow) -> bool:
        """Returns whether this process may train the study and sees its checkpoints.

        Raises UserError instead if the study was named.
        """
        if study.id in self._joined:
            return True
        try:
            if study.environment.get("executor") == "ray-tune":
                raise UserError(
                    f"study {study.name} is driven by Ray Tune, which starts its trials itself: no worker joins it, "
                    "but nodes may join its cluster."
                )
            locations.check(self._home, study, lease.host)
        except (UserError, CheckpointError) as error:
            if self._study is not None or isinstance(error, Away):
                raise
            self._say_once(f"left out: {error}")
            return False
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


def join(
    storage: str,
    home: Home,
    study: str | None,
    *,
    stay: bool = False,
    probes: str | None = None,
    metrics: str | None = None,
) -> int:
    """Trains for the studies of `home` that are driven, or for the one named; returns the exit code once they are done.

    With `stay` it then waits for the next driver, until it is asked to leave, and begins afresh if it loses its trial.
    `probes` is the address at which it says that it runs, `metrics` that of its metrics. If torchrun has started
    several processes, one on each node, the first does this, and the others start their shares of its trials' ranks.
    """
    environ = dict(os.environ)  # for a worker that is replaced: meeting the nodes removes torchrun's variables
    nodes = of_torchrun()
    if nodes is not None and nodes.index > 0:
        return follow(nodes, storage)
    figures = Figures()
    with (
        closing(Ledger(storage, create=False)) as ledger,
        answering(probes, ledger),
        exposed(metrics, home, figures.families),
    ):
        code = _join(ledger, home, JoinableStudies(ledger, home, study, stay=stay), figures, nodes, environ, stay=stay)
    if nodes is not None and code == 0:
        nodes.dismiss()
    return code


def _join(
    ledger: Ledger,
    home: Home,
    driven: JoinableStudies,
    figures: Figures,
    nodes: Nodes | None,
    environ: dict[str, str],
    *,
    stay: bool,
) -> int:
    if driven() is None:
        return 0
    from hpo.workers.worker import FENCED, Worker, serve  # imports torch

    worker = Worker(ledger, home, "joined", say, None, lambda study_id, _: study_id in (driven() or ()), nodes, figures)
    signals: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        worker.preempt()
        outage.leave_soon()
        urgent("leaving: the trial is saved and waits for another worker; once more leaves at once.")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)

    def studies() -> list[int] | None:
        check_complete(nodes)
        return driven()

    code = serve(worker, studies)
    if code == FENCED and stay and not signals:
        worker.close()
        code = AFRESH
    if code == AFRESH:
        say(f"begins afresh after {counted(worker.trained, 'trial')}")
        os.execve(sys.executable, [sys.executable, "-P", "-m", "hpo", *sys.argv[1:]], environ)
    why = "as asked" if signals else "none of its studies is running" if not code else "fenced"
    say(f"left: {why}; trained {counted(worker.trained, 'trial')}")
    return 128 + signals[0] if signals and not code else code


def say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)
