"""Runs a program for a worker and leaves none of its processes behind, whichever process dies. Uses only the standard
library.

    python -I -S guard.py CONTROL PROGRAM [ARGUMENT...]

The worker holds the other end of the pipe CONTROL. `t` asks the program's process group to end (SIGTERM), `k` kills all
that the program has started; so does the end of the pipe, which only the worker holds. On Linux this also reaches
processes that leave the program's group or outlive it: this process is their subreaper, so the kernel makes them its
children once their parent has ended. It ends like the program: with its exit code, or by its signal.
"""

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import sys
import time

NOT_STARTED, NOT_EXECUTABLE = 127, 126  # the exit codes for a missing program and one that may not run, as in a shell
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _start(arguments: list[str]) -> int:
    """Starts the program in its own process group, which dies with this process; returns its pid."""
    parent = os.getpid()
    sys.stdout.flush()
    if (pid := os.fork()) != 0:
        with contextlib.suppress(OSError):  # the child may have done so, and started the program, by now
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_STARTED)
        for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(arguments[0], arguments)
    except OSError as error:
        os.write(2, f"{arguments[0]}: {error.strerror}\n".encode())
        if error.errno in (errno.EACCES, errno.ENOEXEC):
            os._exit(NOT_EXECUTABLE)
    finally:
        os._exit(NOT_STARTED)


def _children() -> list[int]:
    """Returns the pids of this process's children."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc") if _LINUX else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                pids.append(int(name))
    return pids


def _reap() -> dict[int, int]:
    """Returns pid -> status of the children that ended since the last call; status -1 for pid 0 if none is left."""
    exit_codes = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_codes | {0: -1}
        if pid == 0:
            return exit_codes
        exit_codes[pid] = status


def _kill_all(group: int) -> dict[int, int]:
    """Kills the program's group and every descendant; returns pid -> status of the ended ones."""
    exit_codes: dict[int, int] = {}
    while 0 not in exit_codes:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        exit_codes |= _reap()
        time.sleep(0.002)
    return exit_codes


def _watch(control: int, woken: int, program: int) -> int:
    """Follows the worker's requests until the program has ended; returns its status."""
    exit_codes: dict[int, int] = {}
    while program not in exit_codes:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if control in ready:
            word = os.read(control, 1)
            if word == b"t":
                with contextlib.suppress(OSError):
                    os.killpg(program, signal.SIGTERM)
            else:
                break
        exit_codes |= _reap()
    return (exit_codes | _kill_all(program))[program]


def main() -> None:
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status = _watch(control, woken, _start(sys.argv[2:]))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
