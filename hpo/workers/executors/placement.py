"""Chooses where trials run: the executor, the number of workers, and the resources of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.search.own_part import is_own, own_part
from hpo.text import near
from hpo.workers.executors.base import Executor
from hpo.workers.executors.resources import NOTHING_SAID, Resources, gpus_each, host_gpus, needs
from hpo.workers.nodes import replaced

# name -> where it is. To add an executor, add its line here.
EXECUTORS = {
    "inline": "hpo.workers.executors.inline:Inline",
    "local": "hpo.workers.executors.local:Local",
    "ray": "hpo.workers.executors.ray:Ray",
    "ray-tune": "hpo.ray_tune.executor:RayTune",
}
_METHODS = ("start", "step", "end", "preempt", "stop", "kill")  # of a user's own executor
SCHEDULERS = ("asha", "bohb", "fifo", "hyperband", "median", "pb2", "pbt")  # Ray Tune's schedulers, for ray-tune
MAX_WORKERS_PER_CORE = 8  # more processes only wait for each other, and may overload the host
MAX_WORKERS = 10_000  # of a cluster


@dataclass(frozen=True)
class PlacementRequest:
    """An executor, its workers, and the resources of each. None means that the user did not set it."""

    executor: str | None = None
    workers: int | None = None
    resources: Resources = NOTHING_SAID
    scheduler: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> PlacementRequest:
        """Returns the placement with which a study was driven last."""
        resources = Resources(environment.get("cpus_per_worker"), environment.get("gpus_per_worker"))
        return cls(environment.get("executor"), environment.get("workers"), resources, environment.get("scheduler"))

    def over(self, last: PlacementRequest) -> PlacementRequest:
        """Returns this request with unset options from `last`; workers and their resources belong to their executor."""
        if self.executor is not None and self.executor != last.executor:
            return self
        workers = self.workers if self.workers is not None else last.workers
        given_fields = {key: value for key, value in asdict(self.resources).items() if value is not None}
        resources = Resources(**asdict(last.resources) | given_fields)
        return PlacementRequest(last.executor, workers, resources, self.scheduler or last.scheduler)

    def with_defaults(self) -> Placement:
        """Returns the placement with defaults: two local processes, one for inline.

        Raises UserError for impossible ones.
        """
        name = self.executor or "local"
        if not is_own(name):
            one_of("executor", name, tuple(EXECUTORS))
        workers = self.workers if self.workers is not None else (1 if name == "inline" else 2)
        most = MAX_WORKERS if elsewhere(name) else MAX_WORKERS_PER_CORE * (os.cpu_count() or 1)
        least = 0 if name == "local" else 1
        if not least <= workers <= most:
            raise UserError(
                f"{option('workers', workers)}: give {least} to {most} on this host; others can join by `hpo worker`."
            )
        if os.environ.get("HPO_NODES", "1") != "1":
            raise replaced("HPO_NODES")
        if self.scheduler is not None and name != "ray-tune":
            raise UserError(
                f"{option('scheduler', self.scheduler)} with {option('executor', name)}: it belongs to ray-tune."
            )
        if self.scheduler is not None:
            one_of("scheduler", self.scheduler, SCHEDULERS)
        placement = Placement(name, workers, self.resources, self.scheduler or ("asha" if name == "ray-tune" else None))
        if not is_own(name):  # a user's own may lie beside the study, which is not loaded yet
            placement.make()  # raises its errors before anything is written
        return placement


@dataclass(frozen=True)
class Placement:
    """A placement with all its options decided."""

    executor: str = "inline"
    workers: int = 1
    resources: Resources = NOTHING_SAID
    scheduler: str | None = None

    def make(self) -> Executor:
        if is_own(self.executor):
            return own_part("executor", self.executor, Executor, _METHODS)(self.workers, self.resources)
        module, _, attribute = EXECUTORS[self.executor].partition(":")
        return getattr(import_module(module), attribute)(self.workers, self.resources)

    def check(self, study: Study) -> None:
        """Raises UserError if this host lacks the GPUs that the study's workers need, or if they could not use them.

        A cluster's GPUs are not checked: it may grow.
        """
        if elsewhere(self.executor):
            gpus_each(self.resources.gpus, needs(study), self.workers, present=0)
        elif self.executor != "inline":
            host_gpus(self.resources.gpus, needs(study), self.workers)

    def to_json(self) -> dict[str, Any]:
        """Returns the placement as the study's row stores it."""
        fields = {f"{key}_per_worker": value for key, value in asdict(self.resources).items() if value is not None}
        fields |= {"scheduler": self.scheduler} if self.scheduler else {}
        return {"executor": self.executor, "workers": self.workers} | fields


INLINE = Placement()


def elsewhere(executor: str) -> bool:
    """Returns whether its workers run on an existing cluster, not on this host."""
    return executor in ("ray", "ray-tune") and bool(os.environ.get("RAY_ADDRESS"))


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(
            f"{option(name, repr(value))} is not known: choose one of {', '.join(known)}{near(value, known) or '.'}"
        )
