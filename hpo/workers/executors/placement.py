"""Chooses where trials run: the executors by name, how many workers, and what each of them has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from hpo.declaration.study import Study
from hpo.errors import UserError
from hpo.text import near
from hpo.workers.executors.base import Executor
from hpo.workers.executors.resources import NOTHING_SAID, Resources, gpus_each, host_gpus, needs

# name -> where it is. To add one is to add its line here.
EXECUTORS = {
    "inline": "hpo.workers.executors.inline:Inline",
    "local": "hpo.workers.executors.local:Local",
    "ray": "hpo.workers.executors.ray:Ray",
    "ray-tune": "hpo.driver.ray_tune.executor:RayTune",
}
SCHEDULERS = ("asha", "bohb", "fifo", "hyperband", "median", "pb2", "pbt")  # of Ray Tune's, for ray-tune
MAX_WORKERS_PER_CORE = 8  # more processes than that only wait for each other, and may take the host down
MAX_WORKERS = 10_000  # of a cluster


@dataclass(frozen=True)
class PlacementRequest:
    """An executor, its workers, and what each of them has. What is None was not said."""

    executor: str | None = None
    workers: int | None = None
    resources: Resources = NOTHING_SAID
    scheduler: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> PlacementRequest:
        """As a study was driven last."""
        resources = Resources(environment.get("cpus_per_worker"), environment.get("gpus_per_worker"))
        return cls(environment.get("executor"), environment.get("workers"), resources, environment.get("scheduler"))

    def over(self, last: PlacementRequest) -> PlacementRequest:
        """What was said, else as last time; workers and what they have belong to their executor."""
        if self.executor is not None and self.executor != last.executor:
            return self
        workers = self.workers if self.workers is not None else last.workers
        said = {key: value for key, value in asdict(self.resources).items() if value is not None}
        resources = Resources(**asdict(last.resources) | said)
        return PlacementRequest(last.executor, workers, resources, self.scheduler or last.scheduler)

    def settled(self) -> Placement:
        """With its defaults: two local processes, one where it is inline. UserError for what cannot be had."""
        name = self.executor or "local"
        one_of("--executor", name, tuple(EXECUTORS))
        workers = self.workers if self.workers is not None else (1 if name == "inline" else 2)
        most = MAX_WORKERS if elsewhere(name) else MAX_WORKERS_PER_CORE * (os.cpu_count() or 1)
        if not 1 <= workers <= most:
            raise UserError(f"--workers {workers}: give 1 to {most} on this host; others can join by `hpo worker`.")
        if (nodes := os.environ.get("HPO_NODES", "1")) != "1" and workers > 1:
            raise UserError(f"--workers {workers} with HPO_NODES={nodes}: the hosts train one trial at a time; give 1.")
        if self.scheduler is not None and name != "ray-tune":
            raise UserError(f"--scheduler {self.scheduler} with --executor {name}: it belongs to ray-tune.")
        if self.scheduler is not None:
            one_of("--scheduler", self.scheduler, SCHEDULERS)
        found = Placement(name, workers, self.resources, self.scheduler or ("asha" if name == "ray-tune" else None))
        found.make()  # refuses what it cannot have, before anything is written
        return found


@dataclass(frozen=True)
class Placement:
    """A placement that is carried out."""

    executor: str = "inline"
    workers: int = 1
    resources: Resources = NOTHING_SAID
    scheduler: str | None = None

    def make(self) -> Executor:
        module, _, attribute = EXECUTORS[self.executor].partition(":")
        return getattr(import_module(module), attribute)(self.workers, self.resources)

    def check(self, study: Study) -> None:
        """Raise UserError where this host has not the GPUs that the study's workers are to have, or where those could
        not use them. How many a cluster has is not asked: it may grow."""
        if elsewhere(self.executor):
            gpus_each(self.resources.gpus, needs(study), self.workers, present=0)
        elif self.executor != "inline":
            host_gpus(self.resources.gpus, needs(study), self.workers)

    def to_json(self) -> dict[str, Any]:
        """As the study's row has it."""
        said = {f"{key}_per_worker": value for key, value in asdict(self.resources).items() if value is not None}
        said |= {"scheduler": self.scheduler} if self.scheduler else {}
        return {"executor": self.executor, "workers": self.workers} | said


INLINE = Placement()


def elsewhere(executor: str) -> bool:
    """Whether its workers run on a cluster that is there already, and not on this host."""
    return executor in ("ray", "ray-tune") and bool(os.environ.get("RAY_ADDRESS"))


def one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{flag} {value!r} is not known: choose one of {', '.join(known)}{near(value, known) or '.'}")
