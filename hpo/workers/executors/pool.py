"""Keeps workers in slots, each a process that serves many trials; replaces dead ones, until too many have given up."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from hpo.child_process import AFRESH, FAULT, begin_logs
from hpo.errors import HpoError, StorageAway
from hpo.ledger import Ledger, queries
from hpo.ledger.process_id import Process
from hpo.terminal import print
from hpo.workers.executors.base import WorkerContext
from trainer.files import outage

_MAX_FAILURES = 3  # in a row, of workers that gave up or died idle within _EARLY seconds; more are a lasting fault
_EARLY = 20.0
_PERIOD = 1.0  # seconds between two looks at what workers say of a storage that does not answer
_AGAIN = 60.0  # seconds in which a sentence that several workers write is shown once


class WorkerHandle(Protocol):
    """A worker process, here or on another host."""

    @property
    def identity(self) -> Process | None:
        """Returns the worker's process; None if it has not begun."""
        ...

    @property
    def began(self) -> float:
        """Returns when it began, on this process's monotonic clock."""
        ...

    def code(self) -> int | None:
        """Returns its exit code as subprocess reports it: None while it runs, negative if a signal ended it."""
        ...


class Outages:
    """A file into which workers write that a storage does not answer, each sentence on a line of its own."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._next = time.monotonic()
        self._shown: dict[str, float] = {}  # sentence -> when

    def environ(self) -> dict[str, str]:
        """Returns the variables with which a worker waits as this process does, and writes to the file."""
        return outage.environ(self._path)

    def show(self) -> None:
        """Prints the new sentences on standard error, each once."""
        now = time.monotonic()
        if now < self._next or not self._path.exists():
            return
        self._next = now + _PERIOD
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().rpartition(b"\n")[0]
        self._read += len(lines) + 1 if lines else 0
        for line in filter(None, lines.decode(errors="replace").splitlines()):
            if now - self._shown.get(line, -math.inf) >= _AGAIN:
                self._shown[line] = now
                print(f"workers: {line}", file=sys.stderr)


class WorkerPool(ABC):
    """Keeps `workers` handles, each with its own log. Subclasses define how a worker starts and how all of them
    leave."""

    name: str

    def __init__(self, workers: int) -> None:
        self._count = workers
        self._workers: list[Any] = []
        self._leaving = False
        self._failures = 0
        self.codes: dict[tuple[str, int], int] = {}
        self._silent: set[Process] = set()  # those that were killed for it

    def start(self, context: WorkerContext) -> None:
        self._context = context
        self._ledger = Ledger(context.storage, create=False)
        self._run = begin_logs(context.home.logs, context.name, r"(?:worker-\d+|outages)")
        self._outages = Outages(context.home.logs / f"{self._run}.outages.log")
        self._fill()

    def step(self) -> bool:
        self._fill()
        self._outages.show()
        for slot, worker in enumerate(self._workers):
            if not self._leaving and (code := worker.code()) is not None:
                if worker.identity not in self._silent:
                    if process := worker.identity:
                        self.codes[process.host, process.pid] = code
                    self._judge(slot, worker, code)
                self._workers[slot] = self._hire(slot)
        return False

    def end(self, host: str, pid: int) -> None:
        then = "it hangs, or its host is down or cut off; its trial goes to another worker"
        for worker in self._workers:
            if (process := worker.identity) and (process.host, process.pid) == (host, pid) and worker.code() is None:
                self._silent.add(process)
                self._kill(worker)
                then = "it is killed, and another takes its place"
        seconds = self._context.lease_timeout
        print(f"worker pid {pid} on {host} has been silent for {seconds:g} s: {then}.", file=sys.stderr)

    def _fill(self) -> None:
        """Starts workers for the empty slots, once that is possible."""
        while not self._leaving and len(self._workers) < self._count and self._able:
            self._workers.append(self._hire(len(self._workers)))

    @property
    def _able(self) -> bool:
        """Returns whether workers can be started now."""
        return True

    @abstractmethod
    def _hire(self, slot: int) -> WorkerHandle:
        """Returns a new worker for the slot."""

    @abstractmethod
    def _kill(self, worker: Any) -> None:
        """Ends a worker at once, whatever it is doing."""

    def _arguments(self) -> list[str]:
        """Returns the arguments of `python -m hpo.workers.worker`."""
        context = self._context
        return ["--home", str(context.home.root), "--study-id", str(context.study_id), "--executor", self.name]

    def _log(self, slot: int) -> Path:
        """Returns the log of a slot in this run, so that quotes from it belong to this run."""
        return self._context.home.logs / f"{self._run}.worker-{slot}.log"

    def _judge(self, slot: int, worker: WorkerHandle, code: int) -> None:
        """Counts a death outside a trial; raises HpoError once there are too many.

        A death during a trial, whatever its cause, counts among that trial's losses and not here.
        """
        if code == AFRESH:
            return
        process = worker.identity
        trial = process and self._ledger.look(lambda connection: queries.held(connection, process))
        idle = trial is None or trial[1] not in (None, "lost")
        if code == outage.EXIT_CODE:
            raise StorageAway(self._explain(slot, code, trial))
        early = idle and time.monotonic() - worker.began < _EARLY
        self._failures = self._failures + 1 if code == FAULT or early else 0
        if self._failures > _MAX_FAILURES:
            raise HpoError(self._explain(slot, code, trial))

    def _explain(self, slot: int, code: int, trial: tuple[int, str | None] | None) -> str:
        log = self._log(slot)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = lines[-1] if lines else "nothing was printed"
        at = f" after trial {trial[0]}" if trial else ""
        return f"workers cannot go on (exit code {code}{at}; {last}): see {log}."
