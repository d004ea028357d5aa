"""Runs a program on behalf of a worker and leaves nothing of it behind, whoever dies. Standard library alone.

    python -I -S guard.py CONTROL PROGRAM [ARGUMENT...]

The worker holds the other end of the pipe CONTROL. `t` asks the program's process group to end (SIGTERM), `k` kills all
that the program has started; so does the end of the pipe, which is the worker's own. Processes that leave the program's
group, or outlive it, are found all the same on Linux: this process is their subreaper, so the kernel makes them its
children once their parent has ended. It ends as the program has: by its exit code, or by its signal.
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

NOT_STARTED, NOT_EXECUTABLE = 127, 126  # the exit codes where a program is missing, or may not run, as a shell has it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _start(arguments: list[str]) -> int:
    """The pid of the program, in a process group of its own that dies with this process."""
    own = os.getpid()
    sys.stdout.flush()
    if (pid := os.fork()) != 0:
        with contextlib.suppress(OSError):  # it may have done so, and begun, by now
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:
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
    """The pids of this process's children."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if _LINUX else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _reap() -> dict[int, int]:
    """Pid -> status of the children that have ended since the last look; a status of -1 for pid 0: there are none."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended | {0: -1}
        if pid == 0:
            return ended
        ended[pid] = status


def _kill_all(group: int) -> dict[int, int]:
    """Kill the program's group and every descendant; what has ended."""
    ended: dict[int, int] = {}
    while 0 not in ended:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= _reap()
        time.sleep(0.002)
    return ended


def _watch(control: int, woken: int, program: int) -> int:
    """Obey the worker until the program has ended; its status."""
    ended: dict[int, int] = {}
    while program not in ended:
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
        ended |= _reap()
    return (ended | _kill_all(program))[program]


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
