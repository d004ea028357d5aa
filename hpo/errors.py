"""Defines the exceptions of the search layer.

HpoError                exit code 1
├── UserError           a mistake of the user's: value, place and fix in one sentence; exit code 2
│   ├── StudyError      a study that cannot be found, loaded or declared
│   ├── SpaceError      a search space or an override that does not fit the configuration
│   ├── Unreported      an objective that no task reports; ends the study at once
│   ├── DriftError      a study that differs from the ledger's; names what changed
│   ├── HomeError       a home that cannot be used
│   └── NoLedger        the ledger that was looked for does not exist
├── Busy                another driver owns the study: host, pid and since when; exit code 3
├── StorageError        the ledger cannot be opened, read or written
│   ├── StorageAway     it did not answer in time, a later try may succeed; exit code 75
│   ├── OlderLedger     an older release made it, and a reader upgrades nothing
│   ├── LedgerInUse     its upgrade would lock out a process that runs
│   └── DamagedLedger   it holds a value that was never written; retrying does not help
└── StudyStopped        the study's trials fail, or none gives a result; starting it again does not help; exit code 5
"""

from __future__ import annotations

from hpo.door import option
from trainer.files.outage import EXIT_CODE
from trainer.quote import visible
from trainer.redaction import redacted

NO_TORCH = "PyTorch, which is not installed: pip install 'hpo[train]'"


class HpoError(Exception):
    """The base of all errors raised on purpose.

    Its text is one sentence for the user, without passwords and without characters that act on a terminal.
    """

    exit_code = 1

    def __init__(self, *words: object) -> None:
        super().__init__(*(visible(redacted(word)) if isinstance(word, str) else word for word in words))


def needs_torch(error: BaseException) -> bool:
    """Returns True if an import failed because PyTorch is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


class UserError(HpoError):
    """A mistake of the user's: a sentence, or the option at fault with its value, the reason and the fix.

    The Python API and the command line each spell the option in their own form.
    """

    exit_code = 2

    def __init__(
        self, *words: object, field: str | None = None, value: object = None, why: str = "", fix: str = ""
    ) -> None:
        if field is not None:
            words = (f"{option(field, value)}: {'; '.join(filter(None, (why, fix)))}.",)
        super().__init__(*words)
        self.field, self.value = field, value


class StudyError(UserError):
    """Raised when a study cannot be found, loaded or declared."""


class SpaceError(UserError):
    """Raised when a search space or an override does not fit the configuration."""


class Mistakes(SpaceError):
    """Raised when a declaration has several mistakes; its text has one line for each, unlike all other errors."""


class Unreported(UserError):
    """Raised when the task reports, but not the metric of an objective."""


class DriftError(UserError):
    """Raised when the study differs from the one in the ledger."""


class HomeError(UserError):
    """Raised when the home or the ledger's file cannot be used."""


class NoLedger(UserError):
    """Raised when the ledger that was looked for does not exist."""


class Busy(HpoError):
    """Raised when another process holds the lease."""

    exit_code = 3


class StorageError(HpoError):
    """Raised when the ledger cannot be opened, read or written."""


class StorageAway(StorageError):
    """Raised when the ledger's server did not answer for as long as this process waits for it."""

    exit_code = EXIT_CODE


class OlderLedger(StorageError):
    """Raised when the ledger was written by an older release and is not to be upgraded."""


class LedgerInUse(StorageError):
    """Raised when an upgrade of the ledger would lock out a process of an older release that still runs."""


class DamagedLedger(StorageError):
    """Raised for a value in the ledger that cannot have been written; names the table, the row and the fix."""


class StudyStopped(HpoError):
    """Raised when a study has ended without a result, since its trials fail or none gives a value.

    Its own code or declaration is to be corrected: starting it again would only train more trials to the same end.
    """

    exit_code = 5
