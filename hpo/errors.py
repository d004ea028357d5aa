"""The exceptions of the search layer.

HpoError                exit code 1
├── UserError           a mistake of the user's: value, place and fix in one sentence; exit code 2
│   ├── StudyError      a study that cannot be found, loaded or declared
│   ├── SpaceError      a search space or an override that does not fit the configuration
│   ├── Unreported      an objective that no task reports; ends the study at once
│   ├── DriftError      a study that is not the one the ledger knows; names what changed
│   ├── HomeError       a home that cannot be used as the one given
│   └── NoLedger        there is none where one was looked for
├── Busy                another driver owns the study: host, pid and since when; exit code 3
└── StorageError        the ledger cannot be opened, read or written
    └── DamagedLedger   it holds what it cannot have been given; trying again is no help
"""

from __future__ import annotations

from typing import Any

from trainer.quote import visible
from trainer.redaction import redacted

NO_TORCH = "PyTorch, which is not installed: pip install 'hpo[train]'"


class HpoError(Exception):
    """Base of all errors raised on purpose; its text is one sentence for the user, without passwords and
    without characters that act on a terminal."""

    exit_code = 1

    def __init__(self, *words: Any) -> None:
        super().__init__(*(visible(redacted(word)) if isinstance(word, str) else word for word in words))


def needs_torch(error: BaseException) -> bool:
    """Returns True where an import has failed because PyTorch is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


class UserError(HpoError):
    """A mistake of the user's."""

    exit_code = 2


class StudyError(UserError):
    """A study that cannot be found, loaded or declared."""


class SpaceError(UserError):
    """A search space or an override that does not fit the configuration."""


class Unreported(UserError):
    """The task reports, and not what the study judges by."""


class DriftError(UserError):
    """The study differs from the one the ledger knows."""


class HomeError(UserError):
    """The home, or the ledger's file, cannot be used as it was given."""


class NoLedger(UserError):
    """There is no ledger where one was looked for."""


class Busy(HpoError):
    """Another process holds the lease."""

    exit_code = 3


class StorageError(HpoError):
    """The ledger cannot be opened, read or written."""


class DamagedLedger(StorageError):
    """The ledger holds a value that cannot have been written: names the table, the row and what to do."""
