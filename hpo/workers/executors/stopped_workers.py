"""Kills workers of this host that somebody has stopped by SIGSTOP and not continued."""

from __future__ import annotations

import threading
import time

import psutil


class StoppedWorkers:
    """A thread that kills a watched process once it has been stopped for `timeout` seconds.

    It needs no ledger: a worker that was stopped within a transaction holds SQLite's lock, for which all others wait.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._watched: dict[int, psutil.Process] = {}
        self._since: dict[int, float] = {}
        self._killed: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stopped workers", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        try:
            self._watched[pid] = psutil.Process(pid)  # which distinguishes it from a later process with its pid
        except psutil.NoSuchProcess:
            return

    def has_killed(self, pid: int) -> bool:
        return pid in self._killed

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout / 4)):
            for pid, process in [*self._watched.items()]:
                try:
                    self._look(pid, process)
                except psutil.NoSuchProcess:
                    del self._watched[pid]

    def _look(self, pid: int, process: psutil.Process) -> None:
        now = time.monotonic()
        if process.status() != psutil.STATUS_STOPPED:
            self._since.pop(pid, None)
        elif now - self._since.setdefault(pid, now) >= self._timeout:
            self._killed.add(pid)  # first, so that code which sees it dead knows why
            process.kill()
