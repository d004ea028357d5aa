"""The inline executor: trials train one after another in the driver's own process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.terminal import print
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.resources import NOTHING_SAID, Resources

if TYPE_CHECKING:
    from hpo.workers.worker import Worker


WAIT = 5.0  # seconds at a rung for trials of other workers, in which the driver does not get to look after those


class Inline:
    """One worker, here. The simplest to debug: a breakpoint in a task just works. On a terminal it shows, a line every
    ten seconds, how training is getting on."""

    name = "inline"

    def __init__(self, workers: int = 1, resources: Resources = NOTHING_SAID) -> None:
        if resources != NOTHING_SAID:
            raise UserError("--cpus-per-worker and --gpus-per-worker with --executor inline: it has all that is here.")
        if workers != 1:
            raise UserError(f"--workers {workers}: the inline executor trains in one process; use --executor local.")
        self.codes: dict[tuple[str, int], int] = {}
        self._worker: Worker | None = None

    def start(self, context: WorkerContext) -> None:
        from hpo.workers.worker import Worker

        self._study_id = context.study_id
        self._ledger = Ledger(context.storage, create=False)
        show = (lambda text: print(text, flush=True)) if sys.stdout.isatty() else None
        self._worker = Worker(
            self._ledger, context.home, self.name, show=show, worth_while=lambda _, waited: waited < WAIT
        )

    def step(self) -> bool:
        assert self._worker is not None, "start() comes first"
        return self._worker.run_one([self._study_id])

    def preempt(self) -> None:
        if self._worker is not None:
            self._worker.preempt()

    def stop(self, grace: float) -> None:
        if self._worker is not None:
            self._worker.close()
            self._ledger.close()

    def kill(self) -> None:
        """Nothing to do: the worker ends with this process."""
