"""Runs workers wherever a Ray cluster has room, or on a Ray of this host alone.

Each worker is a process like those of the local executor, started by an actor: so it is warm, receives signals, and may
crash without taking the actor along. Ray decides on placement, reservations and new nodes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
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
from hpo.ledger.rows import StudyRow
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.pool import WorkerPool
from hpo.workers.executors.ray_cluster import Cluster, carried_environ, last_line, prepare
from hpo.workers.executors.resources import NOTHING_SAID, Resources, gpu_share, gpus_asked
from trainer.errors import TrainerError

_LOST = -signal.SIGKILL  # the exit code of a worker that was lost with its actor or node
_PATIENCE = 20.0  # seconds without room for a worker before the user is told


class _Host:
    """An actor that runs one worker process, on the node that Ray has chosen."""

    _process: subprocess.Popen[bytes]

    def begin(
        self,
        home: Home,
        study: StudyRow,
        given: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        here: _Origin,
    ) -> Process:
        """Starts the worker; raises UserError if this node does not see the study's checkpoints."""
        locations.check(home, study)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ = {**environ, **path, **carried_environ(here.carried)}
        if here.directory.is_dir():
            os.chdir(here.directory)
        self._process = spawn("hpo.workers.worker", given, log, **environ)
        pid = self._process.pid
        return Process(socket.gethostname(), pid, start_time(pid) or "")

    def ended(self, _: Process) -> int:
        """Returns its exit code, once it has ended."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def leave(self) -> None:
        """Asks it to checkpoint and leave."""
        self._process.terminate()


@dataclass(frozen=True)
class _Origin:
    """The directory where `hpo run` was called, and the one whose code Ray has copied to the actor."""

    directory: Path
    carried: Path | None


@dataclass
class _Worker:
    actor: Any
    begun: Any  # the result of `begin`, once there was room
    ended: Any
    identity: Process | None = None
    began: float = field(default_factory=time.monotonic)  # until there is room, when it was asked for

    def code(self) -> int | None:
        """Returns the exit code as `WorkerHandle` does.

        Raises HpoError if Ray cannot start or keep the actor, and never will.
        """
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
    """Runs `workers` actors, each in its own placement group, whose resources stay reserved while the actor is
    replaced."""

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
            self._origin = _Origin(Path.cwd(), self._cluster.carried)
            self._groups = [self._reserve() for _ in range(self._count)]
            super().start(context)
        except BaseException:
            self._cluster.close()
            raise

    def step(self) -> bool:
        waiting = [worker for worker in self._workers if worker.identity is None]
        if waiting and not self._told and time.monotonic() - min(worker.began for worker in waiting) > _PATIENCE:
            self._told = True
            room = f"{self._cpus} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
            print(f"{len(waiting)} of {self._count} workers wait for room in the Ray cluster: {room}.", file=sys.stderr)
        return super().step()

    def preempt(self) -> None:
        """Sets `leaving` only, since a signal handler may not call Ray: `stop`, which follows, asks the workers."""
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
        """Does nothing: actors end with this process, and their workers with them."""

    def _kill(self, worker: _Worker) -> None:
        worker.actor.kill.remote()

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
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[slot], 0),
        )
        handle, context = cast(Any, actor.remote()), self._context  # its methods have a `remote` that the class lacks
        study = self._ledger.look(lambda connection: queries.study_row(connection, context.name))
        environ = {"HPO_STORAGE": context.storage} | self._outages.environ()
        environ |= gpu_share(self._gpus) | gpus_asked(self._resources.gpus)
        begun = handle.begin.remote(context.home, study, self._arguments(), self._log(slot), environ, self._origin)
        return _Worker(handle, begun, handle.ended.remote(begun))  # after `begin`: methods may overtake each other


def _ready(ref: Any) -> bool:
    import ray

    return bool(ray.wait([ref], timeout=0)[0])


def _get(ref: Any) -> Any:
    """Returns the result of an actor's method; raises its HpoError or TrainerError unchanged."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, HpoError | TrainerError):
            raise error.cause from error
        raise
