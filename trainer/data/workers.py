"""Reads micro-batches: in this process, or in worker processes that are watched.

Torch's DataLoader is not used because of its behaviour when a worker fails: its timeout raises but neither names nor
ends the worker (pytorch#96629), after a worker is killed its shutdown may wait forever for the lock that the dead
worker held (#21554), and its handler of SIGCHLD raises wherever the main thread happens to be, in a commit as well as
in the wait for a batch. Here each worker has its own socket and answers its requests in order, so a waiting process
knows which worker it waits for and what that worker was reading.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import logging
import os
import pickle
import re
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.multiprocessing

from trainer.data.transport import anonymous, map_leaves, receive, receive_descriptor, send, send_descriptor
from trainer.errors import DataError
from trainer.runtime.lifeline import die_with

# The epoch and the indices of one micro-batch.
Request = tuple[int, list[int]]
Read = Callable[[Request], Any]

log = logging.getLogger(__name__)
_GROUPS = (signal.SIGINT, signal.SIGTERM)  # sent to the whole group, but handled by the training process
_STARTED_ANEW = ("jemalloc_bg_thd",)  # restarted by its library in a fork
_DUMP = signal.SIGUSR1  # makes a worker write its stack


class WorkerLost(DataError):
    """Raised when a loader worker hangs or is dead. `stack` is its stack, if it could still write it."""

    def __init__(self, sentence: str, stack: str = "") -> None:
        super().__init__(sentence)
        self.stack = stack


class Reader(Protocol):
    """Reads requests in their order; `timeout` bounds each wait in seconds, None does not."""

    def map(self, requests: Iterable[Request]) -> Iterator[Any]: ...

    def close(self) -> None: ...


def _what(request: Request) -> str:
    epoch, indices = request
    shown = ", ".join(map(str, indices[:64])) + (f", ... ({len(indices)} in all)" if len(indices) > 64 else "")
    return f"indices [{shown}] of epoch {epoch}"


def _pinned(batches: Iterator[Any], pin: bool) -> Iterator[Any]:
    """Returns the batches; with `pin` in page-locked memory, from which copies to the GPU are asynchronous."""
    return (map_leaves(batch, torch.Tensor, torch.Tensor.pin_memory) for batch in batches) if pin else batches


class InProcess:
    """Reads in the calling process. In the main thread, a read longer than `timeout` is ended by a DataError."""

    def __init__(self, read: Read, timeout: float | None, pin: bool = False) -> None:
        self._read, self._timeout, self._pin = read, timeout, pin

    def map(self, requests: Iterable[Request]) -> Iterator[Any]:
        return _pinned(self._map(requests), self._pin)

    def _map(self, requests: Iterable[Request]) -> Iterator[Any]:
        if self._timeout is None or threading.current_thread() is not threading.main_thread():
            yield from map(self._read, requests)
            return
        with _Watch(self._timeout) as watch:
            for request in requests:
                watch.since, watch.request = time.monotonic(), request
                batch = self._read(request)
                watch.since = None
                yield batch

    def close(self) -> None:
        pass


class _Watch:
    """A thread that interrupts the main thread by SIGALRM once its work `since` then takes too long.

    No timer is set, since a process has only one and setting it costs more than many reads. All watches share one
    handler; a process may have several, which end in any order.
    """

    _open: ClassVar[list[_Watch]] = []
    _previous: ClassVar[Any] = None  # the handler installed before the first watch

    def __init__(self, timeout: float) -> None:
        self.since: float | None = None
        self.request: Request = (0, [])
        self._timeout, self._expired = timeout, False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data watch", daemon=True)

    def __enter__(self) -> _Watch:
        if not self._open:
            _Watch._previous = signal.signal(signal.SIGALRM, _Watch._handle)
        self._open.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._open.remove(self)
        if not self._open and signal.getsignal(signal.SIGALRM) == _Watch._handle:
            signal.signal(signal.SIGALRM, _Watch._previous or signal.SIG_DFL)

    def _run(self) -> None:
        while not self._ended.wait(self._timeout / 4):
            if self._late():
                self._expired = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _late(self) -> bool:
        since = self.since
        return since is not None and time.monotonic() - since > self._timeout

    @staticmethod
    def _handle(number: int, frame: Any) -> None:
        expired = [watch for watch in _Watch._open if watch._expired]
        for watch in expired:
            watch._expired = False
            if watch._late():
                raise DataError(
                    f"reading {_what(watch.request)} has taken longer than train.data_timeout ({watch._timeout:g} s): "
                    "fix the data set, or raise train.data_timeout if it is only slow."
                )
        if not expired and callable(_Watch._previous):
            _Watch._previous(number, frame)


class Workers:
    """`count` processes that each read `prefetch` requests ahead; request i goes to worker i % count.

    They live until `close`.
    """

    def __init__(self, read: Read, count: int, timeout: float | None, pin: bool = False, prefetch: int = 2) -> None:
        self._timeout, self._pin, self._prefetch = timeout, pin, prefetch
        self._workers = [_Worker(read, number) for number in range(count)]
        atexit.register(self.close)  # runs before multiprocessing's own, which sends SIGTERM and waits

    def map(self, requests: Iterable[Request]) -> Iterator[Any]:
        try:
            for worker in self._workers:
                worker.drain(self._timeout)  # requests of an epoch that was left early
            yield from _pinned(self._map(iter(requests)), self._pin)
        except WorkerLost:
            self.close()
            raise

    def _map(self, requests: Iterator[Request]) -> Iterator[Any]:
        count = len(self._workers)
        waited_for: deque[_Worker] = deque()
        for number, request in enumerate(itertools.islice(requests, count * self._prefetch)):
            waited_for.append(self._workers[number % count])
            waited_for[-1].ask(request)
        while waited_for:
            worker = waited_for.popleft()
            batch = worker.answer(self._timeout)
            if (request := next(requests, None)) is not None:
                worker.ask(request)
                waited_for.append(worker)
            yield batch

    @property
    def pids(self) -> list[int | None]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()


class _Worker:
    """The training process's side of one worker process."""

    def __init__(self, read: Read, number: int) -> None:
        context = torch.multiprocessing.get_context()
        self.number = number
        self.asked: deque[Request] = deque()
        self._requests = context.Queue()  # its thread writes, so that asking never waits for the worker
        self._requests.cancel_join_thread()
        self._answers, theirs = socket.socketpair()
        self._stack: int | None = None  # the file for its stack; comes with its first message
        self.process = context.Process(target=_serve, args=(read, self._requests, theirs), daemon=True)
        self._left = _threads() if context.get_start_method() == "fork" else []  # threads that it does not have
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUPS)  # until the worker ignores them
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def ask(self, request: Request) -> None:
        self.asked.append(request)
        self._requests.put(request)

    def answer(self, timeout: float | None) -> Any:
        """Returns the batch of the oldest request; raises the error of reading it, and WorkerLost."""
        request = self.asked[0]
        try:
            if self._stack is None and self._ready(timeout):
                self._stack = receive_descriptor(self._answers)
            if not self._ready(timeout):
                raise self._hangs(request, timeout)
            batch, error, text = receive(self._answers)
        except (EOFError, ConnectionError) as broken:
            raise self._died(request) from broken
        self.asked.popleft()
        if error is not None:
            error.add_note(f"in loader worker {self.number}, reading {_what(request)}:\n{text}")
            raise error
        return batch

    def _ready(self, timeout: float | None) -> bool:
        """Returns True if a message arrives within `timeout`; raises EOFError if there will be none."""
        if not wait([self._answers, self.process.sentinel], timeout):
            return False
        if not wait([self._answers], 0):
            raise EOFError
        return True

    def drain(self, timeout: float | None) -> None:
        """Receives and drops the answers that are no longer needed."""
        while self.asked:
            try:
                self.answer(timeout)
            except WorkerLost:
                raise
            except Exception:
                log.warning("an answer that nobody waits for any more is an error", exc_info=True)

    def _hangs(self, request: Request, timeout: float | None) -> WorkerLost:
        stack = self._dump()
        frame = re.search(r'File "(.+)", line (\d+) in (\S+)', stack)
        where = f", at {frame[1]}:{frame[2]} in {frame[3]}" if frame else ""
        fix = "repair the data set"
        if self._left:
            where += f"; a fork leaves threads of libraries behind, here {', '.join(self._left)}"
            fix = "let the data set use such a library in its workers alone, or set train.num_workers=0"
        return WorkerLost(
            f"loader worker {self.number} (pid {self.process.pid}) has not answered within train.data_timeout "
            f"({timeout:g} s): it was reading {_what(request)}{where}; "
            f"{fix}, or raise train.data_timeout if it is only slow.",
            stack,
        )

    def _died(self, request: Request) -> WorkerLost:
        self.process.join(5)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return WorkerLost(
            f"loader worker {self.number} (pid {self.process.pid}) {how} while it was reading {_what(request)}: "
            "if the machine ran out of memory or of /dev/shm, lower train.num_workers."
        )

    def _dump(self, patience: float = 2.0) -> str:
        """Returns the worker's stack; empty if it cannot write it."""
        if self._stack is None:
            return ""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, _DUMP)
        end, size = time.monotonic() + patience, 0
        while time.monotonic() < end:
            time.sleep(0.05)
            before, size = size, os.fstat(self._stack).st_size
            if 0 < before == size:  # it has finished writing
                break
        return os.pread(self._stack, size, 0).decode(errors="replace")

    def close(self) -> None:
        self.process.join(5)
        self._answers.close()
        self._requests.close()
        if self._stack is not None:
            os.close(self._stack)
            self._stack = None


def _threads() -> list[str]:
    """Returns the names that libraries gave to threads of this process, numbers removed; none without /proc."""
    names = dict[str, None]()
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names[task.read_text().strip().rstrip("-0123456789")] = None
    if not names:
        return []
    known = (*_STARTED_ANEW, Path("/proc/self/comm").read_text().strip())
    return [name for name in names if name and name not in known]


def _serve(read: Read, requests: Any, answers: socket.socket) -> None:
    """Runs the worker: answers each request with (batch, None, "") or (None, error, its traceback)."""
    parent = torch.multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    served = torch.multiprocessing.get_start_method() == "forkserver"  # the server is the parent, and dies with it
    die_with(os.getppid() if served else parent.pid)  # the parent may be dead, and replaced by a reaper
    if not parent.is_alive():
        return
    for number in _GROUPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUPS)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    stack = anonymous()
    faulthandler.register(_DUMP, stack, all_threads=False)
    send_descriptor(answers, stack)
    while True:
        request = requests.get()
        try:
            send(answers, (read(request), None, ""))
        except BaseException as error:
            send(answers, (None, _portable(error), traceback.format_exc()))


def _portable(error: BaseException) -> Exception:
    """Returns the error itself if it can be pickled, else a RuntimeError with the same text."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
