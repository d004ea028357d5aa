"""Runs a program: starts it, asks it to end, ends it with all its processes, and keeps its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from hpo.declaration.command import guard
from trainer.errors import ConfigError
from trainer.quote import shortened
from trainer.redaction import redacted

_TAIL = 1 << 13  # bytes at the end of the output that an error quotes from
_LINES = 4
_TRACEBACK = "Traceback (most recent call last):\n"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Program:
    """Runs `arguments` in `directory`, with `environ`, while the block lasts; its output is appended to `output`.

    A guard starts it (guard.py), so that it ends when this process does, and no process that it has started outlives
    the block. Raises ConfigError if it cannot be started.
    """

    def __init__(self, arguments: Sequence[str], directory: Path, environ: Mapping[str, str], output: Path) -> None:
        self._command = [sys.executable, "-I", "-S", guard.__file__]
        self._arguments, self._directory, self._environ, self._output = arguments, directory, environ, output

    def __enter__(self) -> Self:
        control, self._control = os.pipe()
        try:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    [*self._command, str(control), *self._arguments],
                    cwd=self._directory,
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[control],
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            os.close(self._control)
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{self._arguments[0]!r} cannot be started in {self._directory}: {why}.") from error
        finally:
            os.close(control)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._control)  # the guard then kills what is left
        with suppress(KeyboardInterrupt):
            self._process.wait()
        if self._process.returncode < 0:  # the guard may have been killed itself
            self._kill_session()

    def code(self) -> int | None:
        """Returns its exit code, once it has ended; minus the number of a signal, even if a shell reports 128 more."""
        code = self._process.poll()
        return code if code is None or not 128 < code < 128 + signal.NSIG else 128 - code

    def ask_to_end(self) -> None:
        """Sends SIGTERM to its process group."""
        self._say(b"t")

    def kill(self) -> None:
        """Sends SIGKILL to all processes that it has started."""
        self._say(b"k")

    def last_words(self) -> tuple[str, str]:
        """Returns the end of its output: the last lines joined, and the final Python traceback, if there is one."""
        with self._output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = redacted(file.read().decode(errors="replace").replace("\r", "\n"))
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        _, mark, rest = text.rpartition(_TRACEBACK)
        return shortened(" | ".join(lines[-(1 if mark else _LINES) :]), 600), (mark + rest).rstrip() if mark else ""

    def _say(self, word: bytes) -> None:
        with suppress(BrokenPipeError):
            os.write(self._control, word)

    def _kill_session(self) -> None:
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self._process.pid:
                    process.kill()


def from_outside(code: int) -> bool:
    """Returns whether the program was ended from outside: by a person, or by the kernel for lack of memory."""
    return -code in _FROM_OUTSIDE


# The usual meaning of an exit code or a signal, unless a program documents another; `code` explains 128 more than a
# signal.
_MEANINGS = {
    2: "wrong arguments, or a file that is missing, to most programs",
    126: "found, but not executable",
    127: "no such program, or a library of it is missing",
    -signal.SIGKILL: "killed from outside, as for want of memory",
    -signal.SIGTERM: "asked to end from outside",
    -signal.SIGSEGV: "a fault in native code",
    -signal.SIGBUS: "a fault in native code, or no room in shared memory or on the disk",
    -signal.SIGABRT: "native code gave up",
    -signal.SIGILL: "an instruction that this processor lacks",
    -signal.SIGFPE: "a division by zero in native code",
}


def ending(code: int) -> str:
    """Returns `ended with exit code 1`, or `ended by SIGSEGV (a fault in native code)`."""
    meaning = f" ({_MEANINGS[code]})" if code in _MEANINGS else ""
    if code >= 0:
        return f"ended with exit code {code}{meaning}"
    try:
        return f"ended by {signal.Signals(-code).name}{meaning}"
    except ValueError:
        return f"ended by signal {-code}"
