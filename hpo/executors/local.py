"""The local executor: worker processes on this host, each serving many trials."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from hpo.errors import HpoError
from hpo.executors.base import WorkerContext
from hpo.executors.process import begin_logs, spawn

_MAX_FAILURES = 3  # in a row, of workers that gave up or died within _EARLY seconds: then something is broken
_EARLY = 20.0


class Local:
    """`workers` processes in sessions of their own that die with the driver."""

    name = "local"

    def __init__(self, workers: int = 1) -> None:
        self._count = workers
        self._workers: list[tuple[subprocess.Popen[bytes], float]] = []
        self._leaving = False
        self._failures = 0

    def start(self, context: WorkerContext) -> None:
        self._context = context
        self._run = begin_logs(context.home.logs, context.study, r"worker-\d+")
        self._workers = [self._spawn(slot) for slot in range(self._count)]

    def step(self) -> bool:
        for slot, (process, started) in enumerate(self._workers):
            if process.poll() is not None and not self._leaving:
                failed = process.returncode in (1, 2) or time.monotonic() - started < _EARLY
                self._failures = self._failures + 1 if failed else 0
                if self._failures > _MAX_FAILURES:
                    raise HpoError(self._explain(slot, process.returncode))
                self._workers[slot] = self._spawn(slot)
        return False

    def preempt(self) -> None:
        self._leaving = True
        for process, _ in self._workers:
            if process.poll() is None:
                process.terminate()

    def stop(self, grace: float) -> None:
        self.preempt()
        deadline = time.monotonic() + grace
        for process, _ in self._workers:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        self._leaving = True
        for process, _ in self._workers:
            if process.poll() is None:
                process.kill()

    def _spawn(self, slot: int) -> tuple[subprocess.Popen[bytes], float]:
        context = self._context
        arguments = ["--home", str(context.home.root), "--study-id", str(context.study_id)]
        arguments += ["--executor", self.name]
        process = spawn("hpo.worker", arguments, self._log(slot), HPO_STORAGE=context.storage)
        return process, time.monotonic()

    def _log(self, slot: int) -> Path:
        """One for each run and slot: what is quoted from it is of this run."""
        return self._context.home.logs / f"{self._run}.worker-{slot}.log"

    def _explain(self, slot: int, code: int) -> str:
        lines = self._log(slot).read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing was printed"
        return f"workers cannot go on (exit code {code}; {last}): see {self._log(slot)}."
