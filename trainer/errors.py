"""Holds the exceptions of the trainer.

TrainerError
├── ConfigError        a configuration that cannot be trained; a user's mistake
├── DataError          input data that cannot be used; a user's mistake
├── CheckpointError    no checkpoint could be read or written
├── OutOfMemory        raised on one of several ranks: all of them start again with smaller micro-batches
└── Fenced             the trial belongs to another attempt; leave without a trace
"""

from __future__ import annotations

import signal
from typing import Any

from trainer.quote import visible
from trainer.redaction import redacted


class TrainerError(Exception):
    """The base of all errors that the trainer raises on purpose.

    Its text is one sentence for the user, without passwords and without characters that act on a terminal.
    """

    def __init__(self, *words: Any) -> None:
        super().__init__(*(visible(redacted(word)) if isinstance(word, str) else word for word in words))


class ConfigError(TrainerError):
    """Raised for a configuration that cannot be trained: names the field, the value and the fix."""


class DataError(TrainerError):
    """Raised for data that cannot be used: names the file, the row and the column if there is one."""


class CheckpointError(TrainerError):
    """Raised when a checkpoint could not be written, or none of several could be read."""


class OutOfMemory(TrainerError):
    """Raised when memory ran out on this rank and micro-batches of `micro_batch_size` may fit; all ranks then
    restart."""

    def __init__(self, reason: str, micro_batch_size: int) -> None:
        super().__init__(reason)
        self.micro_batch_size = micro_batch_size


class Fenced(TrainerError):
    """Raised when this attempt has lost its trial: another one holds a newer fence."""


class Stopped(BaseException):
    """Raised to end a training from outside; not an Exception, so that training code does not catch it as its own."""


class Interrupted(Stopped, KeyboardInterrupt):
    """Raised for the user's Ctrl-C by a handler that replaced Python's own."""


def is_stop(error: BaseException) -> bool:
    """Returns True if the error came from outside the code that ran.

    A KeyboardInterrupt did if Python's own handler of SIGINT is installed; otherwise the code itself raised it.
    """
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, Stopped)
