"""Keeps workers in slots, each a process that serves many trials; replaces one that dies, until too many have given
up."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hpo.child_process import AFRESH, FAULT, begin_logs
from hpo.errors import HpoError
from hpo.ledger import Ledger, queries
from hpo.ledger.process_id import Process
from hpo.workers.executors.base import WorkerContext

_MAX_FAILURES = 3  # in a row, of workers that gave up or died idle within _EARLY seconds: then something is broken
_EARLY = 20.0


class WorkerHandle(Protocol):
    """A worker process, here or on another host."""

    @property
    def identity(self) -> Process | None:
        """Who it is; None while it has not begun."""
        ...

    @property
    def began(self) -> float:
        """When, on this process's monotonic clock."""
        ...

    def code(self) -> int | None:
        """As subprocess has it: None while it runs, negative where a signal ended it."""
        ...


class WorkerPool(ABC):
    """`workers` hands, each with a log of its own. Subclasses say how one is hired and how all of them leave."""

    name: str

    def __init__(self, workers: int) -> None:
        self._count = workers
        self._workers: list[Any] = []
        self._leaving = False
        self._failures = 0
        self.codes: dict[tuple[str, int], int] = {}

    def start(self, context: WorkerContext) -> None:
        self._context = context
        self._ledger = Ledger(context.storage, create=False)
        self._run = begin_logs(context.home.logs, context.name, r"worker-\d+")
        self._fill()

    def step(self) -> bool:
        self._fill()
        for slot, worker in enumerate(self._workers):
            if not self._leaving and (code := worker.code()) is not None:
                if who := worker.identity:
                    self.codes[who.host, who.pid] = code
                self._judge(slot, worker, code)
                self._workers[slot] = self._hire(slot)
        return False

    def _fill(self) -> None:
        """Hire for the slots that nobody has had, once that is possible."""
        while not self._leaving and len(self._workers) < self._count and self._able:
            self._workers.append(self._hire(len(self._workers)))

    @property
    def _able(self) -> bool:
        """Whether workers can be hired by now."""
        return True

    @abstractmethod
    def _hire(self, slot: int) -> WorkerHandle:
        """A new worker for the slot."""

    def _arguments(self) -> list[str]:
        """Those of `python -m hpo.workers.worker`."""
        context = self._context
        return ["--home", str(context.home.root), "--study-id", str(context.study_id), "--executor", self.name]

    def _log(self, slot: int) -> Path:
        """One for each run and slot: what is quoted from it is of this run."""
        return self._context.home.logs / f"{self._run}.worker-{slot}.log"

    def _judge(self, slot: int, worker: WorkerHandle, code: int) -> None:
        """Count a death that no trial answers for; HpoError once there are too many.

        One that died over a trial, whatever of, counts among that trial's losses and not here.
        """
        if code == AFRESH:
            return
        who = worker.identity
        trial = who and self._ledger.look(lambda connection: queries.held(connection, who))
        idle = trial is None or trial["outcome"] not in (None, "lost")
        early = idle and time.monotonic() - worker.began < _EARLY
        self._failures = self._failures + 1 if code == FAULT or early else 0
        if self._failures > _MAX_FAILURES:
            raise HpoError(self._explain(slot, code, trial))

    def _explain(self, slot: int, code: int, trial: Mapping[Any, Any] | None) -> str:
        log = self._log(slot)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = lines[-1] if lines else "nothing was printed"
        at = f" after trial {trial['number']}" if trial else ""
        return f"workers cannot go on (exit code {code}{at}; {last}): see {log}."
