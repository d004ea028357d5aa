"""Trains trials one after another in the driver's own process."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.terminal import print
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.resources import NOTHING_SAID, Resources

if TYPE_CHECKING:
    from hpo.workers.worker import Worker


WAIT = 5.0  # seconds to wait at a rung for other workers' trials; the driver cannot look after those meanwhile


class Inline:
    """Runs one worker in this process, which is the simplest to debug: a breakpoint in a task just works.

    On a terminal it prints the progress of training every ten seconds.
    """

    name = "inline"

    def __init__(self, workers: int = 1, resources: Resources = NOTHING_SAID) -> None:
        if resources != NOTHING_SAID:
            raise UserError(
                f"{option('cpus_per_worker')} and {option('gpus_per_worker')} with {option('executor', 'inline')}: it "
                "has all that is here."
            )
        if workers != 1:
            raise UserError(
                f"{option('workers', workers)}: the inline executor trains in one process; use "
                f"{option('executor', 'local')}."
            )
        self.codes: dict[tuple[str, int], int] = {}
        self._worker: Worker | None = None

    def start(self, context: WorkerContext) -> None:
        from hpo.workers.worker import Worker

        self._study_id = context.study_id
        self._ledger = Ledger(context.storage, create=False)
        show = partial(print, flush=True) if sys.stdout.isatty() else None
        self._worker = Worker(
            self._ledger, context.home, self.name, show=show, worth_while=lambda _, waited: waited < WAIT
        )

    def step(self) -> bool:
        assert self._worker is not None, "start() comes first"
        return self._worker.run_one([self._study_id])

    def end(self, host: str, pid: int) -> None:
        """Does nothing: its worker is this process."""

    def preempt(self) -> None:
        if self._worker is not None:
            self._worker.preempt()

    def stop(self, grace: float) -> None:
        if self._worker is not None:
            self._worker.close()
            self._ledger.close()

    def kill(self) -> None:
        """Does nothing: the worker ends with this process."""
