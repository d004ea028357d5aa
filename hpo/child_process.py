"""Starts child processes that never outlive their parent and ignore the terminal's Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from hpo import secret_environment
from trainer.runtime.lifeline import die_with
from trainer.runtime.threads import ONE

FAULT = 5  # exit code of a worker process that reports why it cannot go on, unlike that of a task which ends it
AFRESH = 6  # exit code of a worker process to be replaced, since a trial changed what it cannot restore
_PARENT = "HPO_PARENT_PID"
_KEPT_RUNS = 10  # runs of a study whose logs are kept


def begin_logs(directory: Path, study: str, who: str) -> str:
    """Returns the prefix of a run's log names, `<study>.<time>-<pid>`; `.<who>.log` follows, where `who` is a pattern.

    Removes such logs of all but the newest runs.
    """
    name = re.compile(rf"{re.escape(study)}\.(\d{{8}}T\d{{6}}-\d+)\.{who}\.log")
    logs = [(match[1], log) for log in directory.glob("*.log") if (match := name.fullmatch(log.name))]
    kept = sorted({run for run, _ in logs})[1 - _KEPT_RUNS :]
    for run, log in logs:
        if run not in kept:
            log.unlink(missing_ok=True)
    return f"{study}.{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"


def spawn(module: str, arguments: Sequence[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Starts `python -m module` in its own session, its output appended to `log`.

    It does not import from the current directory, which `-m` alone would add: the `hpo` command does not either, and a
    study must find the same modules under every executor.

    Secrets, such as a URL with a password, go through `environ`: other users can read arguments.
    """
    with opened(log) as output:
        return start(module, arguments, output, environ)


def opened(log: Path) -> IO[bytes]:
    """Opens the log for appending."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def start(
    module: str,
    arguments: Sequence[str],
    output: IO[bytes],
    environ: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a process like `spawn`, its output to an open file, with open `descriptors` of this process."""
    # numpy and torch read their number of threads once, at import; a trial sets its own by train.num_threads.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | ONE | {_PARENT: str(os.getpid()), **environ},
        start_new_session=True,
        pass_fds=descriptors,
    )


class NoAnswer(Exception):
    """Raised when an asked process fails or takes too long; its text is the process's last line."""


def ask(module: str, question: str, within: float | None = None) -> str:
    """Returns the answer of `python -m module` to `question` on its standard input.

    Waits `within` seconds if given. Raises NoAnswer.
    """
    environment = secret_environment.without(os.environ) | ONE | {_PARENT: str(os.getpid())}
    command = [sys.executable, "-P", "-m", module]
    try:
        process = subprocess.run(
            command, input=question, capture_output=True, text=True, env=environment, check=False, timeout=within
        )
    except subprocess.TimeoutExpired:
        raise too_late(within) from None
    return answered(process.returncode, process.stdout, process.stderr)


def answered(code: int, output: str, errors: str) -> str:
    """Returns the last line that the process has written. Raises NoAnswer if it failed."""
    if code:
        raise NoAnswer((errors.strip().splitlines() or [f"exit code {code}"])[-1])
    return output.strip().splitlines()[-1]


def too_late(within: float | None) -> NoAnswer:
    return NoAnswer(f"it took more than {within:g} s")


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies; call it first in the child.

    Only Linux supports this; elsewhere `orphaned` detects the parent's death.
    """
    if parent := os.environ.get(_PARENT):
        die_with(int(parent))


def orphaned() -> bool:
    """Returns whether the process that spawned this one is gone; False for one started by hand."""
    parent = os.environ.get(_PARENT)
    return parent is not None and os.getppid() != int(parent)
