"""Workers that begin with everything imported: one process imports it once for all of a run's, and is forked for each.

    driver -> request -> prepared process: fork, fork -> the worker, which its driver adopts

What a study's task has to be asked before there are workers is asked of such a fork too (`ask`).

The process in between ends at once, and a driver that asks is the nearest subreaper (man 2 prctl) while it does. So a
worker is its child as if it had spawned it: it waits for it and signals it, and the worker dies with it.

Forked is only what has one thread and has not touched CUDA, neither of which a fork carries over; the study's code is
imported by each worker for itself. Where this cannot be, on a system without /proc or after the prepared process has
died, workers are spawned.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

from hpo.child_process import answered, ask, die_with_parent, start, too_late

_MODULE = "hpo.workers.worker"
_IMPORTED = (_MODULE, "hpo.workers.lanes", "sqlalchemy.dialects.sqlite")
_ROOM = 4096  # bytes of a command line, over which that of a worker is written
_OWN_THREADS = {"jemalloc_bg_thd"}  # which its library starts anew in a fork
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 15, 36, 37
_READY = b"ready"


class Forked:
    """A worker that was forked, with what is used of `subprocess.Popen`; `terminate` and `kill` are safe in a signal
    handler."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: how it ended is lost, as subprocess has it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
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
                os.kill(self.pid, number)  # not yet waited for, so that nobody else has the pid


class Prepared:
    """The prepared process as its driver has it: it imports what every worker needs from the beginning on, and forks
    once it has. `close` ends it; what it has forked lives on."""

    def __init__(self) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self.failure = False, ""
        with theirs:
            number = theirs.fileno()
            arguments = [str(number), "." * _ROOM]
            try:
                self._process = start("hpo.workers.prepared", arguments, self._said, {}, [number])
            except OSError as error:
                self.failure = f"the process that workers are forked from cannot be started ({error.strerror})"

    @staticmethod
    def possible() -> bool:
        return sys.platform == "linux" and Path("/proc/self/task").exists()

    @property
    def settled(self) -> bool:
        """Whether it can fork, or has failed, which `failure` then explains; False while it still imports."""
        if not self._ready and not self.failure and select.select([self._connection], [], [], 0)[0]:
            said = self._received()
            self._ready = said == _READY
            if not self._ready:
                self.failure = said.decode() or self._last_words()
        return self._ready or bool(self.failure)

    def fork(self, arguments: Sequence[str], output: IO[bytes], environ: Mapping[str, str]) -> Forked | None:
        """A worker with these arguments, its output in `output`; None where the process fails, as `failure` explains.
        Only once it is settled."""
        return self._forked(_MODULE, {1: output, 2: output}, arguments, environ)

    def ask(self, module: str, question: str, within: float | None = None) -> str:
        """As `child_process.ask`, of a fork, which need not import; of a process as there where it cannot fork."""
        while not self.settled:
            time.sleep(0.01)
        with ExitStack() as files:
            asked, output, errors = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            asked.write(question)
            asked.seek(0)  # which it has in common with the fork
            process = self._forked(module, {0: asked, 1: output, 2: errors})
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
        try:
            return self._connection.recv(1 << 12)
        except OSError:
            return b""

    def _last_words(self) -> str:
        """Of a process that has ended, or is about to."""
        assert self._process is not None  # else its failure is known from the beginning
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the process that workers are forked from does not answer"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"the process that workers are forked from has ended (exit code {code}{': ' if lines else ''}" + (
            f"{lines[-1]})" if lines else ")"
        )


@contextmanager
def _adopting() -> Iterator[None]:
    """Have orphans below this process become its children, as they may already have been. Raises OSError."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before)) or libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "this system lets no process adopt another")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; returns in a fork alone, with what it is to be and its streams."""
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
    """Why a fork of this process would not be sound; empty where it would."""
    torch = sys.modules.get("torch")
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if left := sorted({*names[1:]} - _OWN_THREADS):
        return f"what workers import has started threads ({', '.join(left)}), which a fork would not have"
    if torch and torch.cuda.is_initialized():
        return "what workers import has initialised CUDA, which no fork may use"
    return ""


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Make of this fork what a spawned process is: its session, streams, environment and name, and other randomness."""
    os.environ.update(request["environ"])
    die_with_parent()
    os.setsid()
    for descriptor, stream in zip(descriptors, request["streams"], strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.argv = [request["module"], *request["arguments"]]
    _show([sys.executable, "-P", "-m", *sys.argv], f"hpo-{request['module'].rpartition('.')[2].replace('_', '-')}")
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python reseeds its own; torch's default seed is no random one


def _show(command: Sequence[str], name: str) -> None:
    """Let `ps` and `top` tell this process apart: write over the command line, which the kernel reads where it was."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    stat = Path("/proc/self/stat").read_text()
    begin, end = (int(field) for field in stat[stat.rindex(")") + 2 :].split()[45:47])  # arg_start, arg_end
    words = b"\0".join(map(os.fsencode, command)) + b"\0"
    ctypes.memmove(begin, words[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def main() -> NoReturn:
    die_with_parent()
    import gc
    from importlib import import_module
    from importlib.util import find_spec

    connection = socket.socket(fileno=int(sys.argv[1]))
    _show([sys.executable, "-P", "-m", "hpo.workers.prepared"], "hpo-prepared")
    for module in [*_IMPORTED, "safetensors.torch"] if find_spec("torch") else _IMPORTED:
        import_module(module)
    from hpo.declaration.identity import load_installed

    load_installed()  # of the code that is loaded here, and that each worker has
    gc.collect()
    gc.freeze()  # no collection in a worker touches, and so copies, the pages of what is imported
    refusal = _unfit()
    connection.send(refusal.encode() or _READY)
    request, descriptors = _serve(connection)
    _become(request, descriptors)
    sys.exit(import_module(request["module"]).main())


if __name__ == "__main__":
    main()
