"""Forks workers from a prepared process, which imports their modules once for all workers of a run.

    driver -> request -> prepared process: fork, fork -> the worker, which its driver adopts

Questions to a study's task that come before its workers are answered by such a fork too (`ask`).

The process in between ends at once, and the driver is the nearest subreaper (man 2 prctl) during its request. So the
worker becomes its child as if it had been spawned: the driver waits for it and signals it, and the worker dies with it.

The prepared process forks only while it has one thread and has not initialised CUDA, since a fork carries over neither.
Each worker imports the study's code for itself. Workers are spawned instead on a system without /proc, or after the
prepared process has died.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

import psutil

from hpo.child_process import answered, ask, die_with_parent, start, too_late
from hpo.secret_environment import withheld

_MODULE = "hpo.workers.worker"
_IMPORTED = (_MODULE, "sqlalchemy.dialects.sqlite")
_ANSWER = 30.0  # seconds for a fork, and for the imports of a stopped process
_OWN_THREADS = {"jemalloc_bg_thd"}  # restarted in a fork by its library
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 15, 36, 37
_READY = b"ready"


class Forked:
    """A forked worker, with the interface of `subprocess.Popen` that is needed.

    `terminate` and `kill` are safe in a signal handler.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the worker runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: the exit code is lost, as in subprocess
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code and returns it. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(_MODULE, timeout)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # SIGCHLD is ignored
                os.kill(self.pid, number)  # not waited for yet, so no other process has the pid


class Prepared:
    """The driver's handle of the prepared process, which imports the workers' modules and then forks workers.

    `close` ends it; the processes that it has forked live on.
    """

    def __init__(self) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self.failure, self._begun = False, "", time.monotonic()
        with theirs:
            number = theirs.fileno()
            try:
                self._process = start("hpo.workers.prepared", [str(number)], self._said, {}, [number])
            except OSError as error:
                self.failure = f"the process that workers are forked from cannot be started ({error.strerror})"

    @staticmethod
    def possible() -> bool:
        return sys.platform == "linux" and Path("/proc/self/task").exists()

    @property
    def finished_starting(self) -> bool:
        """Returns True once it can fork or has failed, as `failure` explains; False while it still imports."""
        if not self._ready and not self.failure and select.select([self._connection], [], [], 0)[0]:
            message = self._received()
            self._ready = message == _READY
            if not self._ready:
                self.failure = message.decode() or self._last_words()
        if not self._ready and not self.failure and time.monotonic() - self._begun > _ANSWER and self._is_stopped():
            self.failure = self._last_words()
        return self._ready or bool(self.failure)

    def fork(self, arguments: Sequence[str], output: IO[bytes], environ: Mapping[str, str]) -> Forked | None:
        """Forks a worker with these arguments, its output in `output`. It may be called once `finished_starting` is
        True.

        Returns None if the process has failed, as `failure` explains.
        """
        return self._forked(_MODULE, {1: output, 2: output}, arguments, environ)

    def ask(self, module: str, question: str, within: float | None = None) -> str:
        """Returns the answer as `child_process.ask` does, from a fork, or from a new process if it cannot fork."""
        while not self.finished_starting:
            time.sleep(0.01)
        with ExitStack() as files:
            request, output, errors = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            request.write(question)
            request.seek(0)  # the fork shares the position
            process = self._forked(module, {0: request, 1: output, 2: errors})
            if process is None:
                return ask(module, question, within)
            try:
                code = process.wait(within)
            except subprocess.TimeoutExpired:
                raise too_late(within) from None
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            errors.seek(0)
            return answered(code, output.read(), errors.read())

    def _forked(
        self,
        module: str,
        streams: Mapping[int, IO[Any]],
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> Forked | None:
        if self.failure:
            return None
        request = {"module": module, "arguments": [*arguments], "environ": {**environ}, "streams": [*streams]}
        descriptors = [stream.fileno() for stream in streams.values()]
        try:
            with _adopting():
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                reply = self._received()
        except OSError as error:
            reply = b"" if error.errno in (errno.EPIPE, errno.ECONNRESET) else str(error).encode()
        if not reply.isdigit():
            self.failure = reply.decode() or self._last_words()
            return None
        return Forked(int(reply))

    def close(self) -> None:
        self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _received(self) -> bytes:
        """Returns the process's answer, empty if none comes in time."""
        try:
            return self._connection.recv(1 << 12) if select.select([self._connection], [], [], _ANSWER)[0] else b""
        except OSError:
            return b""

    def _is_stopped(self) -> bool:
        try:
            return self._process is not None and psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def _last_words(self) -> str:
        """Returns the reason of the failure of a process that has ended or is about to end."""
        assert self._process is not None  # else `failure` is set from the beginning
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # so that it does not fork a worker later
            return "the process that workers are forked from does not answer"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"the process that workers are forked from has ended (exit code {code}{': ' if lines else ''}" + (
            f"{lines[-1]})" if lines else ")"
        )


@contextmanager
def _adopting() -> Generator[None, None, None]:
    """Makes orphans below this process its children, and restores the earlier setting. Raises OSError."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before)) or libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "this system lets no process adopt another")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks for each request. It returns only in a fork, with the request and the descriptors of its streams."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 18, 3)
        if not message:
            os._exit(0)
        if (refusal := _unfit()) or not descriptors:
            connection.send(refusal.encode())
            os._exit(0)
        (pid_in, pid_out), (go_in, go_out) = os.pipe(), os.pipe()
        if not (between := os.fork()):
            if worker := os.fork():
                os.write(pid_out, str(worker).encode())
                os._exit(0)
            for descriptor in (go_out, pid_in, pid_out, connection.detach()):
                os.close(descriptor)
            os.read(go_in, 1)  # ends once the driver has adopted this process
            os.close(go_in)
            return json.loads(message), descriptors
        os.waitpid(between, 0)
        connection.send(os.read(pid_in, 64))
        for descriptor in (*descriptors, pid_in, pid_out, go_in, go_out):
            os.close(descriptor)


def _unfit() -> str:
    """Returns the reason why this process cannot be forked safely; empty if it can."""
    torch = sys.modules.get("torch")
    if left := sorted({*_threads()} - _OWN_THREADS):
        return f"what workers import has started threads ({', '.join(left)}), which a fork would not have"
    if torch and torch.cuda.is_initialized():
        return "what workers import has initialised CUDA, which no fork may use"
    return ""


def _threads() -> list[str]:
    """Returns the names of this process's threads except the first."""
    names: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended while /proc was read
            names.append(path.read_text().strip())
    return names[1:]


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Gives this fork its own session, streams, environment, name and random seeds, as a spawned process has."""
    os.environ.update(request["environ"])
    die_with_parent()
    os.setsid()
    for descriptor, stream in zip(descriptors, request["streams"], strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.argv = [request["module"], *request["arguments"]]
    _name_process(request["module"])
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python reseeds its own generator; torch's default seed is fixed


def _name_process(module: str) -> None:
    """Sets the name of this process in `top` and in `ps -o comm`, such as hpo-worker."""
    name = f"hpo-{module.rpartition('.')[2].replace('_', '-')}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def main() -> NoReturn:
    die_with_parent()
    with withheld():  # from a fork's environment too; a worker receives the ledger's URL
        _fork_and_become()


def _fork_and_become() -> NoReturn:
    import gc
    from importlib import import_module
    from importlib.util import find_spec

    connection = socket.socket(fileno=int(sys.argv[1]))
    _name_process("hpo.workers.prepared")
    for module in [*_IMPORTED, "safetensors.torch"] if find_spec("torch") else _IMPORTED:
        import_module(module)
    from hpo.declaration.identity import load_installed

    load_installed()  # the digests of the code that is loaded here, which each worker has too
    gc.collect()
    gc.freeze()  # so that no collection in a worker touches, and so copies, the pages of the imported modules
    refusal = _unfit()
    connection.send(refusal.encode() or _READY)
    request, descriptors = _serve(connection)
    _become(request, descriptors)
    sys.exit(import_module(request["module"]).main())


if __name__ == "__main__":
    main()
