"""Waits for a storage that does not answer: the ledger's server, or the bucket of the checkpoints. Torch-free.

Only a process that drives or trains a study waits: `waiting` sets for how long, and workers get it from `environ`. It
prints once that it waits, with the time that is left, and that the storage answers again.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.quote import visible
from trainer.redaction import redacted

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the storage did not come back, and a later start may find it
_SECONDS, _NOTICES = "HPO_OUTAGE_SECONDS", "HPO_OUTAGE_NOTICES"
_TOLD_AFTER = 2.0  # seconds; a restart of a server may be shorter
_LEAVING = 10.0  # seconds that a process still waits once it was asked to leave
_SHORTEST, _LONGEST = 0.05, 2.0  # seconds between two tries


class _Wait:
    """Holds the time that this process waits, and when it was asked to leave, on the monotonic clock."""

    seconds: float | None = None
    left_at = math.inf


def seconds(default: float = 0.0) -> float:
    """Returns how long this process waits for a storage; `default` where nobody has set it."""
    return float(os.environ.get(_SECONDS, default)) if _Wait.seconds is None else _Wait.seconds


def is_set() -> bool:
    return _Wait.seconds is not None or _SECONDS in os.environ


@contextmanager
def waiting(wait: float) -> Iterator[None]:
    """Makes this process wait up to `wait` seconds for each outage within the block."""
    before, _Wait.seconds, _Wait.left_at = _Wait.seconds, wait, math.inf
    try:
        yield
    finally:
        _Wait.seconds, _Wait.left_at = before, math.inf


def leave_soon() -> None:
    """Shortens the waits of this process, which was asked to leave. Safe in a signal handler."""
    _Wait.left_at = min(_Wait.left_at, time.monotonic())


def environ(notices: Path | None = None) -> dict[str, str]:
    """Returns the variables by which a worker waits as this process does.

    It appends what it alone may meet to the file `notices`, which the driver shows.
    """
    variables = {_SECONDS: str(seconds())} if is_set() else {}
    return variables | ({_NOTICES: str(notices)} if notices else {})


class Outage:
    """The outages of one storage, as all threads of this process meet them. `name` is a text without a password."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._since: float | None = None  # the first failure after the last success
        self._told = self._alone = False

    def again(self, why: str, patience: float, *, alone: bool = True) -> bool:
        """Sleeps, and returns True if the call that failed is to be made again; False once the wait is over.

        `why` completes a sentence that begins with the storage's name. A worker that may meet it `alone` has its driver
        show that.
        """
        now = time.monotonic()
        with self._lock:
            self._since = now if self._since is None else self._since
            lasted = now - self._since
            left = min(self._since + patience, max(self._since, _Wait.left_at) + _LEAVING) - now
            if left <= 0:
                return False
            tell = lasted >= _TOLD_AFTER and not self._told
            if tell:
                self._told, self._alone = True, alone
        if tell:
            _tell(f"{self._name} {why}; this process waits for it, up to {spelled(left)} more.", alone)
        time.sleep(min(left, max(_SHORTEST, min(lasted / 4, _LONGEST))))
        return True

    def over(self) -> None:
        """Notes that the storage has answered."""
        if self._since is None:
            return
        with self._lock:
            lasted = time.monotonic() - (self._since or time.monotonic())
            was_told, self._since, self._told = self._told, None, False
        if was_told:
            _tell(f"{self._name} answers again, after {spelled(lasted)}.", self._alone)


def spelled(lasted: float) -> str:
    """Returns `40 s` or `15 min`."""
    return f"{lasted:.0f} s" if lasted < 120 else f"{lasted / 60:.0f} min"


def _tell(sentence: str, alone: bool) -> None:
    line = visible(redacted(sentence))
    print(line, file=sys.stderr, flush=True)
    if alone and (notices := os.environ.get(_NOTICES)):
        try:
            with open(notices, "a") as file:
                file.write(f"{line}\n")
        except OSError:
            return  # standard error, the worker's log, has it
