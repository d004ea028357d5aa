"""Defines the base class of study drivers: this package's own, and those of integrations in which a library decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from hpo.clock import Clock, SystemClock
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver.leased_study import LeasedStudy
from hpo.driver.request import DriverOptions
from hpo.ledger import Ledger
from hpo.workers.executors.base import Executor


class StudyDriver(ABC):
    """Drives one study to the end of its budget: `acquire`, `run`, `release`.

    `request_stop` and `kill` may be called from a signal handler. After `run`, `reason` says why the study is not
    complete.
    """

    def __init__(
        self,
        ledger: Ledger,
        resolved: ResolvedStudy,
        options: DriverOptions,
        executor: Executor,
        clock: Clock | None = None,
    ) -> None:
        self._ledger, self._resolved, self._options = ledger, resolved, options
        self._executor, self._clock = executor, clock or SystemClock()
        self._leased: LeasedStudy | None = None
        self._stopping = False
        self.reason = ""

    @property
    def study(self) -> LeasedStudy:
        """Returns the study between `acquire` and `release`."""
        assert self._leased is not None, "acquire the study first"
        return self._leased

    @property
    def idle(self) -> bool:
        """Returns whether, after `acquire`, nothing is left to train."""
        return self.study.frontier.idle

    def acquire(self) -> None:
        """Becomes the study's driver. Raises Busy if another driver is alive."""
        self._leased = LeasedStudy(self._ledger, self._resolved, self._options, self._executor, self._clock)

    @property
    def leaves_time(self) -> bool:
        """Returns whether the search has ended by its time alone, of which an end phase has its part."""
        return self.study.by_time_alone and self.study.frontier.expired and not self._stopping

    def run(self, on_tick: Callable[[], None] = lambda: None) -> str:
        """Drives the study to its end. Returns its final state: complete, stopped or interrupted."""
        if not (self.idle or self.study.conclude()):
            with self.study.workers(self._executor):
                self.drive(on_tick)
            self.study.conclude()  # a trial may have ended while the workers were leaving
        state, self.reason = self.study.end(stopping=self._stopping)
        return state

    def request_stop(self) -> None:
        """Stops gracefully: workers save their trials and leave, and every trial waits for the next resume."""
        self._stopping = True
        self._executor.preempt()

    def kill(self) -> None:
        """Ends the workers at once."""
        self._executor.kill()

    def release(self) -> None:
        """Lets another process drive the study."""
        self.study.release()

    @abstractmethod
    def drive(self, on_tick: Callable[[], None]) -> None:
        """Trains until the study is done, its time is used up or a stop is requested. Calls `on_tick` repeatedly."""

    @abstractmethod
    def all_ended(self) -> bool:
        """Returns whether nothing is left to train, according to the ledger."""
