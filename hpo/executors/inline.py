"""The inline executor: trials train one after another in the driver's own process."""

from __future__ import annotations

from hpo.executors.base import WorkerContext


class Inline:
    """One worker, here. The simplest to debug: a breakpoint in a task just works."""

    name = "inline"

    def __init__(self, workers: int = 1) -> None:
        from hpo.errors import UserError

        if workers != 1:
            raise UserError(
                f"--workers {workers} with --executor inline: it trains in one process; use --executor local."
            )

    def start(self, context: WorkerContext) -> None:
        from hpo.worker import Worker

        self._worker = Worker(context, self.name)

    def step(self) -> bool:
        return self._worker.run_one()

    def preempt(self) -> None:
        self._worker.preempt()

    def stop(self, grace: float) -> None:
        self._worker.close()

    def kill(self) -> None:
        """Nothing to do: the worker ends with this process."""
