"""Connects to the Ray cluster where Tune runs the trials; Tune decides which and when (see `driver.py`)."""

from __future__ import annotations

from pathlib import Path

from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.ray_cluster import Cluster, prepare
from hpo.workers.executors.resources import NOTHING_SAID, Resources


class RayTune:
    """Runs Tune's trials in their own processes, `workers` at a time, as many as there is room for.

    `each` holds the resources of one trial, once it has started.
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

    def end(self, host: str, pid: int) -> None:
        """Does nothing: Tune replaces its processes itself."""

    def preempt(self) -> None:
        """Sets `leaving`, which the driver reads between two steps of Tune."""
        self.leaving = True

    def stop(self, grace: float) -> None:
        self._cluster.close()

    def kill(self) -> None:
        """Does nothing: Ray's processes end with this one."""
