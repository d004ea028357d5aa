"""Calls a function for each of many jobs, in this process or in several, a few jobs at a time."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

_WAITING = 2  # jobs for each process, so that memory holds few of them
_WATCH = 1.0  # seconds

Job = TypeVar("Job")


def for_each(function: Callable[[Job], None], jobs: Iterable[Job], processes: int) -> None:
    """Calls `function` for each job; in several processes by `spawn`, so that it must be picklable."""
    if processes == 1:
        for job in jobs:
            function(job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_watch, initargs=(os.getpid(),)) as pool:
        running: deque[Future[None]] = deque()
        try:
            for job in jobs:
                running.append(pool.submit(function, job))
                if len(running) > _WAITING * processes:
                    running.popleft().result()
            while running:
                running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _watch(parent: int) -> None:
    """Ends this process once its parent is gone, since a process that is killed cannot end those it has started."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
