"""Defines the contract of an executor, which decides where workers run. Every executor gives the same study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hpo.declaration.study import Study
from hpo.storage.home import Home
from hpo.workers.prepared import Prepared


@dataclass(frozen=True)
class WorkerContext:
    """The data that workers need to train a study; `prepared`, if set, forks the workers on this host.

    A worker that is inactive for `lease_timeout` seconds loses its trial.
    """

    storage: str
    home: Home
    study_id: int
    name: str
    study: Study
    prepared: Prepared | None = None
    lease_timeout: float = 30.0


class Executor(Protocol):
    """Owns workers, never trials: the driver reclaims the trial of a dead worker."""

    name: str

    @property
    def codes(self) -> Mapping[tuple[str, int], int]:
        """Returns host and pid -> exit code, as subprocess reports it, of the workers that are known to have ended."""
        ...

    def start(self, context: WorkerContext) -> None:
        """Starts the workers; returns without waiting for them."""
        ...

    def step(self) -> bool:
        """Does a piece of work here, or looks after the workers elsewhere (replaces the dead).

        Returns True if a trial was trained in this call, so that the driver checks at once what to ask next. Raises
        HpoError if workers cannot be kept alive.
        """
        ...

    def end(self, host: str, pid: int) -> None:
        """Handles a silent worker: kills it if it belongs to this executor, so that `step` starts another."""
        ...

    def preempt(self) -> None:
        """Asks every worker to checkpoint and leave; safe in a signal handler, returns at once."""
        ...

    def stop(self, grace: float) -> None:
        """Does the same as `preempt`, and waits up to `grace` seconds; kills workers that are left."""
        ...

    def kill(self) -> None:
        """Ends every worker at once; safe in a signal handler."""
        ...
