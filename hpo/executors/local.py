"""The local executor: worker processes on this host, each serving many trials."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import RowMapping

from hpo.errors import HpoError
from hpo.executors.base import WorkerContext
from hpo.executors.process import FAULT, begin_logs, spawn
from hpo.ledger import Ledger, reads
from hpo.ledger.process import Process, start_time

_MAX_FAILURES = 3  # in a row, of workers that gave up or died idle within _EARLY seconds: then something is broken
_EARLY = 20.0


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    identity: Process
    started: float = field(default_factory=time.monotonic)


class Local:
    """`workers` processes in sessions of their own that die with the driver."""

    name = "local"

    def __init__(self, workers: int = 1) -> None:
        self._count = workers
        self._workers: list[_Worker] = []
        self._leaving = False
        self._failures = 0

    def start(self, context: WorkerContext) -> None:
        self._context = context
        self._ledger = Ledger(context.storage, create=False)
        self._run = begin_logs(context.home.logs, context.study, r"worker-\d+")
        self._workers = [self._spawn(slot) for slot in range(self._count)]

    def step(self) -> bool:
        for slot, worker in enumerate(self._workers):
            if worker.process.poll() is not None and not self._leaving:
                self._judge(slot, worker)
                self._workers[slot] = self._spawn(slot)
        return False

    def preempt(self) -> None:
        self._leaving = True
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.terminate()

    def stop(self, grace: float) -> None:
        self.preempt()
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

    def _spawn(self, slot: int) -> _Worker:
        context = self._context
        arguments = ["--home", str(context.home.root), "--study-id", str(context.study_id)]
        arguments += ["--executor", self.name]
        process = spawn("hpo.worker", arguments, self._log(slot), HPO_STORAGE=context.storage)
        return _Worker(process, Process(socket.gethostname(), process.pid, start_time(process.pid) or ""))

    def _log(self, slot: int) -> Path:
        """One for each run and slot: what is quoted from it is of this run."""
        return self._context.home.logs / f"{self._run}.worker-{slot}.log"

    def _judge(self, slot: int, worker: _Worker) -> None:
        """Count a death that no trial answers for; HpoError once there are too many.

        One that died over a trial, whatever of, counts among that trial's losses and not here.
        """
        code = worker.process.returncode
        trial = self._ledger.look(lambda connection: reads.held(connection, worker.identity))
        idle = trial is None or trial["outcome"] not in (None, "lost")
        early = idle and time.monotonic() - worker.started < _EARLY
        self._failures = self._failures + 1 if code == FAULT or early else 0
        if self._failures > _MAX_FAILURES:
            raise HpoError(self._explain(slot, code, trial))

    def _explain(self, slot: int, code: int, trial: RowMapping | None) -> str:
        lines = self._log(slot).read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing was printed"
        at = f" after trial {trial['number']}" if trial else ""
        return f"workers cannot go on (exit code {code}{at}; {last}): see {self._log(slot)}."
