"""The exceptions of the trainer.

TrainerError
├── ConfigError        a configuration that cannot be trained; a user's mistake
├── DataError          input data that cannot be used; a user's mistake
├── CheckpointError    no checkpoint could be read or written
├── OutOfMemory        of one of several ranks: all of them start again with smaller micro-batches
└── Fenced             the trial belongs to another attempt; leave without a trace
"""

from __future__ import annotations

import signal
from typing import Any

from trainer.quote import visible
from trainer.redaction import redacted


class TrainerError(Exception):
    """Base of all errors the trainer raises on purpose; its text is one sentence for the user, without passwords and
    without characters that act on a terminal."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*(visible(redacted(word)) if isinstance(word, str) else word for word in words))


class ConfigError(TrainerError):
    """The configuration cannot be trained: names the field, the value and the fix."""


class DataError(TrainerError):
    """The data cannot be used: names the file, the row and the column where there is one."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written, or none of those offered could be read."""


class OutOfMemory(TrainerError):
    """Memory ran out on this rank, and micro-batches of `micro_batch_size` may fit: all ranks are started again."""

    def __init__(self, reason: str, micro_batch_size: int) -> None:
        super().__init__(reason)
        self.micro_batch_size = micro_batch_size


class Fenced(TrainerError):
    """This attempt has lost its trial: another one holds a newer fence."""


class Stopped(BaseException):
    """Ends a training from outside; no Exception, so that no code that trains takes it for an error of its own."""


class Interrupted(Stopped, KeyboardInterrupt):
    """The user's Ctrl-C, raised by a handler that took the place of Python's own."""


def is_stop(error: BaseException) -> bool:
    """Returns whether the error came from outside of the code that ran. A KeyboardInterrupt does where Python's own
    handler of SIGINT is in place; elsewhere the code has raised it."""
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, Stopped)
