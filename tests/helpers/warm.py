"""Processes of `python -m hpo...` and of ranks that begin with everything imported.

Importing torch, Optuna and MLflow takes four seconds of processor time, and most of what the suite starts trains for
less than one. So a session starts one process that has imported them, and it forks what `python -m MODULE` would have
started: a real process with a pid, streams, signals, session and exit code of its own, whose parent is the one that
asked for it. The switch lies below `subprocess.Popen`, so neither the tests nor the product know of it:

    Popen -> request -> zygote: fork, fork -> the grandchild, which its asker adopts as the nearest subreaper

A process so begun forks a zygote of its own first, so what it starts is warm too. A process begins cold, as for users,
where its environment asks for other threads or libraries or says HPO_COLD=1, and where a shell or Ray starts it. Either
way it begins on the host that its environment names (`namespaces`).
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import namespaces

# The last is a node of tests/trainer/distributed/test_nodes.py.
MODULES = (
    "hpo",
    "hpo.workers.worker",
    "hpo.workers.prepared",
    "hpo.tracking.mirror_process",
    "hpo.alerts.process",
    "trainer.distributed.rank",
    "rank_runs",
)
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.func",
    "torch.nn.attention",
    "torch.nn.parallel",
    "numpy",
    "optuna.samplers",
    "cmaes",
    "sqlalchemy.dialects.sqlite",
    "psycopg",
    "alembic.command",
    "pyarrow.parquet",
    "sklearn.datasets",
    "scipy.optimize",
    "scipy.stats",
    "psutil",
    "rich.live",
    "rich.table",
    "safetensors.torch",
    "mlflow.tracking",
    "mlflow.entities",
    "mlflow.store.tracking.sqlalchemy_store",
    "hpo.cli.main",
    "hpo.driver.run",
    "hpo.driver.loop",
    "hpo.workers.attempt",
    "hpo.workers.lanes",
    "hpo.workers.manual_worker",
    "hpo.workers.ranks",
    "hpo.workers.reporter",
    "hpo.storage.gc",
    "hpo.verify",
    "hpo.tracking.mirror",
    "hpo.tracking.mlflow.tracker",
    "hpo.workers.executors.local",
    "hpo.workers.executors.inline",
    "hpo.search.samplers.registry",
    "trainer.loop",
    "trainer.distributed.launch",
    "trainer.memory.estimate",
    "trainer.distributed.ddp",
    "trainer.distributed.fsdp",
    "trainer.distributed.pipeline_stages",
    "trainer.distributed.zero1",
    "trainer.distributed.rank",
)
# What libraries read while they are imported: a process that wants other values has to import them itself.
READ_AT_IMPORT = (
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_CBWR",
    "LD_PRELOAD",
    "PYTHONWARNINGS",
    "PYTHONHASHSEED",
)
_ROOM = 8192  # bytes of a zygote's command line, which what it forks writes its own over
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_cold = subprocess.Popen._execute_child
_libc = ctypes.CDLL(None, use_errno=True)


class _Zygote:
    """A zygote as those that ask it see it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def started(cls) -> _Zygote:
        """One in a process of its own, which ends with this one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), "." * _ROOM]
        environ = {name: value for name, value in _began_with.items() if not name.startswith("COVERAGE_")}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL)
        theirs.close()
        atexit.register(lambda: (ours.close(), process.wait()))
        return cls(ours)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of the process that begins as `request` says, a child of this one."""
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                fds = array.array("i", descriptors)
                self._connection.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                reply = self._connection.recv(64)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not reply:
            raise RuntimeError("the process that forks warm ones has died; HPO_COLD=1 does without it.")
        return int(reply)


_zygote: _Zygote | None = None


def looked_at_by_nobody(args: Any) -> None:
    pass


look = looked_at_by_nobody  # is called with each command line before it begins
cold = False  # whether every process begins so
_began_with = dict(os.environ)  # a zygote's environment, which others can read, is no test's


def install(*, always_cold: bool = False) -> None:
    """From here on `subprocess.Popen` shows command lines to `look` and begins processes warm where they may be."""
    global cold, _began_with
    cold, _began_with = always_cold, dict(os.environ)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[method-assign]


def _may_be_warm(args: Any, environ: Mapping[str, str]) -> bool:
    if cold or not isinstance(args, (list, tuple)) or environ.get("HPO_COLD") == "1":
        return False
    words = [os.fspath(word) for word in args]
    module = words[2:3] if words[1:2] == ["-m"] else words[3:4] if words[1:3] == ["-P", "-m"] else []
    same = all(environ.get(name, "1") in ("1", _DEFAULTS.get(name)) for name in READ_AT_IMPORT)
    return words[0] == sys.executable and module != [] and module[0] in MODULES and same and _one_thread(environ)


_DEFAULTS = {"MKL_CBWR": "AUTO,STRICT"}


def _one_thread(environ: Mapping[str, str]) -> bool:
    return environ.get("OMP_NUM_THREADS") == "1"


def _execute_child(self: Any, args: Any, *rest: Any) -> None:
    """As subprocess.Popen has it in CPython 3.11, whose arguments these are."""
    executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = rest[:9]
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid, umask, new_session, group = rest[9:]
    look(args)
    environ = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
    usual = executable is None or executable == sys.executable
    plain = usual and preexec_fn is None and not shell and gid is None and gids is None and uid is None
    if not (plain and umask == -1 and group == -1 and _may_be_warm(args, environ)):
        apart = isinstance(args, (list, tuple)) and namespaces.away(environ)
        return _cold(self, namespaces.command(args) if apart else args, *rest)
    global _zygote
    if _zygote is None:
        _zygote = _Zygote.started()
    request = {
        "args": [os.fspath(word) for word in args],
        "cwd": os.fspath(cwd or os.getcwd()),
        "env": environ,
        "session": bool(new_session),
        "numbers": list(pass_fds),
        "sigint": signal.getsignal(signal.SIGINT) != signal.SIG_IGN,
    }
    streams = [given if given != -1 else usual for given, usual in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
    try:
        self.pid = _zygote.fork(request, [*streams, *pass_fds])
        self._child_created = True
    finally:
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
    return None


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns in the forked process alone, with the request that it is to be."""
    while True:
        message, ancillary, *_ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 64))
        if not message:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        (pid_in, pid_out), (go_in, go_out) = os.pipe(), os.pipe()
        if not (child := os.fork()):
            if grandchild := os.fork():
                os.write(pid_out, str(grandchild).encode())
                os._exit(0)
            os.close(go_out)
            os.read(go_in, 1)  # ends once the asker has adopted this process
            return json.loads(message) | {"descriptors": list(descriptors)}
        os.waitpid(child, 0)
        connection.send(os.read(pid_in, 64))
        for descriptor in (*descriptors, pid_in, pid_out, go_in, go_out):
            os.close(descriptor)


def _become(request: dict[str, Any]) -> None:
    """Make of this fork what exec would have made: streams, descriptors, session, signals, environment, names."""
    if request["session"]:
        os.setsid()
    wanted = [0, 1, 2, *request["numbers"]]
    high = [fcntl_dup(descriptor) for descriptor in request["descriptors"]]
    for descriptor, number in zip(high, wanted, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with contextlib.suppress(OSError):  # the directory that was listed
                os.close(int(name))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1, errors="strict", line_buffering=os.isatty(1))
    sys.stderr = sys.__stderr__ = _stream(2, errors="backslashreplace", line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler if request["sigint"] else signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(_set_by_imports | request["env"])
    if host := namespaces.away(request["env"]):
        namespaces.enter(host)
    _name(request["args"])


def _stream(descriptor: int, **how: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(descriptor, "wb", closefd=False), encoding="utf-8", **how)


def fcntl_dup(descriptor: int) -> int:
    """A copy whose number none of those asked for has."""
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 256)


def _name(args: Sequence[str]) -> None:
    """Let others see the command line that this process was asked for."""
    stat = Path("/proc/self/stat").read_text()
    start, end = (int(field) for field in stat[stat.rindex(")") + 2 :].split()[45:47])
    words = b"\0".join(os.fsencode(word) for word in args) + b"\0"
    ctypes.memmove(start, words[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _own_zygote() -> None:
    """Fork what forks for this process, before it has done anything."""
    global _zygote
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        _zygote = _Zygote(ours)
        install()
        return
    ours.close()
    _die_with(parent)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, theirs.fileno())
    os.closerange(theirs.fileno() + 1, 1024)
    _name([sys.executable, "zygote"])
    _run(_serve(theirs))


def _die_with(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _run(request: dict[str, Any]) -> None:
    """Be `python [-P] -m MODULE ARGUMENT...`; ends this process."""
    import runpy

    _libc.prctl(_PR_SET_PDEATHSIG, 0)
    _become(request)
    args = request["args"]
    at = args.index("-m") + 1
    sys.path[:] = request["env"].get("PYTHONPATH", "").split(os.pathsep) if request["env"].get("PYTHONPATH") else []
    sys.path[:0] = [] if "-P" in args[:at] else [request["cwd"]]
    sys.path += _site_path
    sys.argv = ["-m", *args[at + 1 :]]
    _reread()
    if args[at] in ("hpo", "hpo.workers.worker", "rank_runs"):
        _own_zygote()
    _measure()
    if args[at] == "hpo.workers.prepared":
        _forks_workers()
    code = 0
    try:
        runpy._run_module_as_main(args[at])  # type: ignore[attr-defined]
    except SystemExit as end:
        code = _code(end)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    _leave(code)


def _forks_workers() -> None:
    """Have each worker that this process forks have a zygote of its own, as one has that is begun here."""
    from hpo.workers import worker

    work = worker.main

    def main() -> int:
        _own_zygote()
        _measure()
        return work()

    worker.main = main


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    """End as the interpreter does, but for taking everything imported apart, which would copy all of its pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _measure() -> None:
    """Have `make coverage` see this process, which it would have found at the interpreter's start."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        coverage.process_startup(force=True)


def _reread() -> None:
    """Have what reads the environment as it is imported read this process's."""
    from trainer.runtime import failpoint

    if "HPO_TESTING" in os.environ:
        importlib.reload(failpoint)


_set_by_imports: dict[str, str] = {}
_site_path: list[str] = []


def main() -> None:
    _die_with(int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    _site_path.extend(sys.path[1:])
    for module in PRELOADED:
        importlib.import_module(module)
    _set_by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if lost := [name for name in threads[1:] if name != "jemalloc_bg_thd"]:  # which jemalloc starts anew in a fork
        raise RuntimeError(f"importing has left threads that a fork has not: {lost}.")
    import gc

    gc.collect()
    gc.freeze()
    _run(_serve(connection))


if __name__ == "__main__":
    import warm  # by its own name, since what is forked puts its module in the place of __main__

    warm.main()
