"""The contract of an executor: where workers run. Every executor gives the same study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hpo.declaration.study import Study
from hpo.storage.home import Home
from hpo.workers.prepared import Prepared


@dataclass(frozen=True)
class WorkerContext:
    """What workers need to train a study; `prepared`, if there is one, forks those of this host."""

    storage: str
    home: Home
    study_id: int
    name: str
    study: Study
    prepared: Prepared | None = None


class Executor(Protocol):
    """Owns workers, never trials: what a dead worker held is taken back by the driver."""

    name: str

    @property
    def codes(self) -> Mapping[tuple[str, int], int]:
        """Host and pid -> exit code, as subprocess has it, of the workers that are known to have ended."""
        ...

    def start(self, context: WorkerContext) -> None:
        """Bring up the workers; return without waiting for them."""
        ...

    def step(self) -> bool:
        """Do a piece of work here, or look after the workers elsewhere (replace the dead).

        True if a trial was trained in this call, so that the driver looks at once for what to ask next. Raises
        HpoError when workers cannot be kept alive.
        """
        ...

    def preempt(self) -> None:
        """Ask every worker to checkpoint and leave; safe in a signal handler, returns at once."""
        ...

    def stop(self, grace: float) -> None:
        """Like `preempt`, and wait up to `grace` seconds; what is left after that is killed."""
        ...

    def kill(self) -> None:
        """End every worker at once; safe in a signal handler."""
        ...
