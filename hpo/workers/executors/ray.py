"""The Ray executor: workers wherever a Ray cluster has room, or on a Ray of this host alone.

Each worker is the process that the local executor starts too, in the care of an actor: so it is warm, hears signals,
and may crash without taking the actor along. Where there is room, what is reserved and when nodes are added is Ray's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hpo.child_process import spawn
from hpo.errors import HpoError
from hpo.ledger import queries
from hpo.ledger.process_id import Process, start_time
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.pool import WorkerPool
from hpo.workers.executors.ray_cluster import Cluster, carried_environ, last_line, prepare
from hpo.workers.executors.resources import NOTHING_SAID, Resources, gpu_share, gpus_asked
from trainer.errors import TrainerError

_LOST = -signal.SIGKILL  # the exit code of a worker that was lost with its actor or node
_PATIENCE = 20.0  # seconds without room for a worker, after which the user is told


class _Host:
    """An actor: one worker process, on the node that Ray has chosen."""

    _process: subprocess.Popen[bytes]

    def begin(
        self,
        home: Home,
        study: Mapping[str, Any],
        given: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        here: _Place,
    ) -> Process:
        """Start the worker; UserError where this node does not see the study's checkpoints."""
        locations.check(home, study)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ = {**environ, **path, **carried_environ(here.carried)}
        if here.directory.is_dir():
            os.chdir(here.directory)
        self._process = spawn("hpo.workers.worker", given, log, **environ)
        pid = self._process.pid
        return Process(socket.gethostname(), pid, start_time(pid) or "")

    def ended(self, _: Process) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def leave(self) -> None:
        """Ask it to checkpoint and leave."""
        self._process.terminate()


@dataclass(frozen=True)
class _Place:
    """Where `hpo run` was called, and the directory whose code Ray has carried to the actor."""

    directory: Path
    carried: Path | None


@dataclass
class _Worker:
    actor: Any
    begun: Any  # what `begin` returns, once there was room
    ended: Any
    identity: Process | None = None
    began: float = field(default_factory=time.monotonic)  # until there is room: asked for

    def code(self) -> int | None:
        """As `Hand` has it; HpoError where Ray cannot begin or keep the actor, and would not another time either."""
        from ray.exceptions import LocalRayletDiedError, NodeDiedError, OutOfMemoryError, RayActorError, RayError

        try:
            if self.identity is None:
                if not _ready(self.begun):
                    return None
                self.identity, self.began = _get(self.begun), time.monotonic()
            return _get(self.ended) if _ready(self.ended) else None
        except (RayActorError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError):
            return _LOST
        except RayError as error:
            why = f"{type(error).__name__}: {last_line(error)}"
            raise HpoError(f"a worker could not begin in the Ray cluster ({why}).") from error


class Ray(WorkerPool):
    """`workers` actors, each in a placement group of its own: the place stays reserved while one is replaced."""

    name = "ray"

    def __init__(self, workers: int = 1, resources: Resources = NOTHING_SAID) -> None:
        prepare(self.name)
        super().__init__(workers)
        self._resources = resources
        self._cluster = Cluster()
        self._told = False

    def start(self, context: WorkerContext) -> None:
        self._cpus, self._gpus = self._cluster.open(context, self._count, self._resources)
        try:
            self._place = _Place(Path.cwd(), self._cluster.carried)
            self._groups = [self._reserve() for _ in range(self._count)]
            super().start(context)
        except BaseException:
            self._cluster.close()
            raise

    def step(self) -> bool:
        waiting = [worker for worker in self._workers if worker.identity is None]
        if waiting and not self._told and time.monotonic() - min(one.began for one in waiting) > _PATIENCE:
            self._told = True
            room = f"{self._cpus} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
            print(f"{len(waiting)} of {self._count} workers wait for room in the Ray cluster: {room}.", file=sys.stderr)
        return super().step()

    def preempt(self) -> None:
        """Ray may not be called from a signal handler: they are told by `stop`, which follows."""
        self._leaving = True

    def stop(self, grace: float) -> None:
        import ray

        self._leaving = True
        running = [worker for worker in self._workers if worker.identity is not None and not _ready(worker.ended)]
        for worker in running:
            worker.actor.leave.remote()
        ray.wait([worker.ended for worker in running] or [ray.put(0)], num_returns=max(1, len(running)), timeout=grace)
        self._cluster.close()
        self._ledger.close()

    def kill(self) -> None:
        """Nothing to do: actors end with this process, and their workers with them."""

    def _reserve(self) -> Any:
        from ray.util.placement_group import placement_group

        bundle = {"CPU": float(self._cpus)} | ({"GPU": float(self._gpus)} if self._gpus else {})
        return placement_group([bundle], strategy="STRICT_PACK")

    def _hire(self, slot: int) -> _Worker:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(_Host).options(  # type: ignore[attr-defined]
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[slot], 0),
        )
        one, context = cast(Any, actor.remote()), self._context  # its methods have a `remote` that a class has not
        row = self._ledger.look(lambda connection: queries.study_row(connection, context.name))
        study = {column: row[column] for column in ("name", "uid", "environment")}
        environ = {"HPO_STORAGE": context.storage} | gpu_share(self._gpus) | gpus_asked(self._resources.gpus)
        begun = one.begin.remote(context.home, study, self._arguments(), self._log(slot), environ, self._place)
        return _Worker(one, begun, one.ended.remote(begun))  # after `begin`: methods may overtake each other


def _ready(ref: Any) -> bool:
    import ray

    return bool(ray.wait([ref], timeout=0)[0])


def _get(ref: Any) -> Any:
    """What a method of an actor returned; raises its HpoError or TrainerError as it was."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, HpoError | TrainerError):
            raise error.cause from error
        raise
