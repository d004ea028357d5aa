"""Connects to the Ray cluster where Tune runs the trials; Tune decides which and when (see `driver.py` beside this)."""

from __future__ import annotations

from pathlib import Path

from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.ray_cluster import Cluster, prepare
from hpo.workers.executors.resources import NOTHING_SAID, Resources


class RayTune:
    """Tune's trials are processes of their own: as many at a time as there is room for, here `workers`.

    `each` says what one is given, once it has started.
    """

    name = "ray-tune"

    def __init__(self, workers: int = 1, resources: Resources = NOTHING_SAID) -> None:
        prepare(self.name)
        self._count, self._resources = workers, resources
        self._cluster = Cluster()
        self.leaving = False
        self.codes: dict[tuple[str, int], int] = {}
        self.each: dict[str, float] = {}

    @property
    def carried(self) -> Path | None:
        return self._cluster.carried

    def start(self, context: WorkerContext) -> None:
        cpus, gpus = self._cluster.open(context, self._count, self._resources)
        self.each = {"cpu": cpus, "gpu": gpus}

    def step(self) -> bool:
        return False

    def preempt(self) -> None:
        """Tune looks at `leaving` between two of its steps."""
        self.leaving = True

    def stop(self, grace: float) -> None:
        self._cluster.close()

    def kill(self) -> None:
        """Nothing to do: Ray's processes end with this one."""
