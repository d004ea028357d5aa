"""Child processes that never outlive their parent and are deaf to the terminal's Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from trainer.runtime.lifeline import die_with
from trainer.runtime.threads import ONE

FAULT = 5  # exit code of a worker process that says why it cannot go on, told from that of a task which ends it
AFRESH = 6  # exit code of a worker process that another is to replace, since a trial changed what it cannot restore
_PARENT = "HPO_PARENT_PID"
_KEPT_RUNS = 10  # of a study, whose logs stay


def begin_logs(directory: Path, study: str, who: str) -> str:
    """What the names of a run's logs begin with, `<study>.<time>-<pid>`; `.<who>.log` follows, `who` a pattern.

    Of such logs those of the newest runs stay, this one among them.
    """
    name = re.compile(rf"{re.escape(study)}\.(\d{{8}}T\d{{6}}-\d+)\.{who}\.log")
    logs = [(match[1], log) for log in directory.glob("*.log") if (match := name.fullmatch(log.name))]
    kept = sorted({run for run, _ in logs})[1 - _KEPT_RUNS :]
    for run, log in logs:
        if run not in kept:
            log.unlink(missing_ok=True)
    return f"{study}.{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"


def spawn(module: str, arguments: Sequence[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start `python -m module` in a session of its own, its output appended to `log`.

    It does not import from the current directory, which `-m` alone would add: the `hpo` command does not either, and a
    study is to find its modules alike under every executor.

    What is secret, such as a URL with a password, goes through `environ`: other users can read arguments.
    """
    with opened(log) as output:
        return start(module, arguments, output, environ)


def opened(log: Path) -> IO[bytes]:
    """The log, to be appended to."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def start(
    module: str,
    arguments: Sequence[str],
    output: IO[bytes],
    environ: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """As `spawn`, its output to an open file, with open `descriptors` of this process."""
    # numpy and torch read their threads once, at import; a trial gets its own from train.num_threads.
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
    """A process that was asked has failed; the last line that it wrote, or that it took too long."""


def ask(module: str, question: str, within: float | None = None) -> str:
    """What `python -m module`, as `spawn` starts it, answers to `question` on its standard input, `within` seconds if
    that is given. Raises NoAnswer."""
    environment = os.environ | ONE | {_PARENT: str(os.getpid())}
    command = [sys.executable, "-P", "-m", module]
    try:
        asked = subprocess.run(
            command, input=question, capture_output=True, text=True, env=environment, check=False, timeout=within
        )
    except subprocess.TimeoutExpired:
        raise too_late(within) from None
    return answered(asked.returncode, asked.stdout, asked.stderr)


def answered(code: int, output: str, errors: str) -> str:
    """The last line of what a process that was asked has written. Raises NoAnswer where it has failed."""
    if code:
        raise NoAnswer((errors.strip().splitlines() or [f"exit code {code}"])[-1])
    return output.strip().splitlines()[-1]


def too_late(within: float | None) -> NoAnswer:
    return NoAnswer(f"it took more than {within:g} s")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that spawned it dies; call first thing in the child.

    Only Linux has this; elsewhere the parent's death is found out by `orphaned`.
    """
    if parent := os.environ.get(_PARENT):
        die_with(int(parent))


def orphaned() -> bool:
    """Whether the process that spawned this one is gone; False for one started by hand."""
    parent = os.environ.get(_PARENT)
    return parent is not None and os.getppid() != int(parent)
