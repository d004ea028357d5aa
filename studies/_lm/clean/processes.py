"""Calls a function for each of many jobs, in this process or in several, a few jobs at a time.

The processes hold a lock on a directory for as long as they live, so that a run can wait for those of a run which was
killed, and may still be writing there.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from trainer.errors import DataError

_WAITING = 2  # jobs beside those that run, so that memory holds few of them
_WATCH = 1.0  # seconds

Job = TypeVar("Job")


def for_each(function: Callable[[Job], None], jobs: Iterable[Job], processes: int, directory: Path) -> None:
    """Calls `function` for each job; if it is for several processes it must be picklable.

    They hold `directory`. Raises DataError if one of them is killed.
    """
    if processes == 1:
        for job in jobs:
            function(job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_watch, initargs=(os.getpid(), directory)) as pool:
        running: deque[Future[None]] = deque()
        try:
            for job in jobs:
                running.append(pool.submit(function, job))
                if len(running) > processes + _WAITING:
                    running.popleft().result()
            while running:
                running.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a process was killed, perhaps for lack of memory: give the same command with fewer processes, which "
                "goes on from here."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def wait_for_others(directory: Path) -> None:
    """Waits until no process holds the directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _watch(parent: int, directory: Path) -> None:
    """Holds the directory, and ends this process once its parent is gone, which cannot end it if it is killed."""
    fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_SH)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
