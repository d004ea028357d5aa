"""Runs worker processes on this host, each serving many trials."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from hpo.child_process import opened, spawn
from hpo.ledger.process_id import Process, start_time
from hpo.terminal import print
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.pool import WorkerPool
from hpo.workers.executors.resources import NOTHING_SAID, Resources, cpu_slots, host_gpus, needs
from hpo.workers.executors.stopped_workers import StoppedWorkers
from hpo.workers.prepared import Forked, Prepared


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes] | Forked
    identity: Process
    began: float = field(default_factory=time.monotonic)

    def code(self) -> int | None:
        return self.process.poll()


class Local(WorkerPool):
    """Runs `workers` processes in their own sessions that die with the driver, each with its CPUs and GPUs, if any.

    They are forked from a prepared process once that has imported what they need, and spawned if there is none.
    """

    name = "local"

    def __init__(self, workers: int = 1, resources: Resources = NOTHING_SAID) -> None:
        super().__init__(workers)
        self._resources = resources
        self._cpus = cpu_slots(workers, resources.cpus, usable()) if resources.cpus else ()
        self._prepared: Prepared | None = None
        self._workers: list[_Worker] = []

    def start(self, context: WorkerContext) -> None:
        self._gpus = host_gpus(self._resources.gpus, needs(context.study), self._count)
        self._prepared = context.prepared
        self._stopped = StoppedWorkers(context.lease_timeout)
        super().start(context)

    def step(self) -> bool:
        for worker in self._workers:
            if (process := worker.identity) not in self._silent and self._stopped.has_killed(process.pid):
                self._silent.add(process)
                print(
                    f"worker pid {process.pid} had been stopped (SIGSTOP) for {self._context.lease_timeout:g} s: it is "
                    "killed, and another takes its place.",
                    file=sys.stderr,
                )
        return super().step()

    def preempt(self) -> None:
        self._leaving = True
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.terminate()

    def stop(self, grace: float) -> None:
        self.preempt()
        self._stopped.close()
        deadline = time.monotonic() + grace
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._ledger.close()

    def kill(self) -> None:
        self._leaving = True
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()

    def _kill(self, worker: _Worker) -> None:
        worker.process.kill()

    @property
    def _able(self) -> bool:
        return self._prepared is None or self._prepared.finished_starting

    def _hire(self, slot: int) -> _Worker:
        environ = {"HPO_STORAGE": self._context.storage} | self._gpus[slot] | self._outages.environ()
        process = self._forked(slot, environ) or spawn(
            "hpo.workers.worker", self._arguments(), self._log(slot), **environ
        )
        if self._cpus:
            os.sched_setaffinity(process.pid, self._cpus[slot])
        self._stopped.watch(process.pid)
        return _Worker(process, Process(socket.gethostname(), process.pid, start_time(process.pid) or ""))

    def _forked(self, slot: int, environ: dict[str, str]) -> Forked | None:
        if self._prepared is None:
            return None
        with opened(self._log(slot)) as output:
            worker = self._prepared.fork(self._arguments(), output, environ)
        if worker is None:
            print(f"{self._prepared.failure}: each worker imports torch for itself.", file=sys.stderr)
            self._prepared = None
        return worker


def usable() -> list[int] | None:
    """Returns the CPUs that this process may run on; None if the system cannot bind processes to them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None
