"""Bounds a study: trials, epochs and wall-clock time, each a total over all its resumptions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from hpo.door import option
from hpo.errors import UserError
from hpo.text import UNITS, spelled
from trainer.quote import quoted

_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
MAX_COUNT = 2**31 - 1  # the largest value of the ledger's columns
MAX_SECONDS = 3660 * 86400


class Bounds(Protocol):
    """The columns of a study's row that bound it."""

    @property
    def requested(self) -> int: ...

    @property
    def max_epochs(self) -> int | None: ...

    @property
    def max_seconds(self) -> float | None: ...


@dataclass(frozen=True)
class Budget:
    """Bounds on a study, None for no bound; the first that is reached ends the study.

    trials    asked for, except those that were lost to the infrastructure
    epochs    trained by those trials. Trial n is asked for if the trials before it, once they have ended, have trained
              fewer than that; so the last trial may exceed it, by less than its own length
    seconds   of a driver's run. Trials that run at the end are saved, and wait for a resume with more time
    """

    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, study: Bounds) -> Budget:
        """Returns the budget stored in a study's row."""
        return cls(study.requested or None, study.max_epochs, study.max_seconds)

    def columns(self) -> dict[str, int | float | None]:
        """Returns the columns of the study's row."""
        return {"requested": self.trials or 0, "max_epochs": self.epochs, "max_seconds": self.seconds}

    def __bool__(self) -> bool:
        return self != Budget()

    def over(self, stored: Budget) -> Budget:
        """Returns this budget with missing bounds taken from `stored`."""
        bounds = {name: value for name, value in vars(self).items() if value is not None}
        return Budget(**(vars(stored) | bounds))

    def check(self, study: str, stored: Budget, used: Budget) -> None:
        """Raises UserError if a new bound is below what is already used."""
        for name, field, shown in _SHOWN:
            bound, spent = getattr(self, name), getattr(used, name)
            if bound is not None and bound != getattr(stored, name) and bound < spent:
                noun = "" if name == "seconds" else f" {name}"
                raise UserError(
                    f"{option(field, shown(bound))}: study {study!r} has used {shown(spent)}{noun} already; "
                    "give that or more."
                )


def parse_time(text: str, field: str = "time", *, zero: bool = False) -> float:
    """Returns the seconds of `2h`, `90m`, `1d12h`, `1h30m` or `3600`, the value of an option; with `zero` also 0.

    Raises UserError.
    """
    match = _TIME.fullmatch(text.strip().lower())
    parts = match.groups() if match else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, UNITS.values(), strict=False) if part)
    if match is None or not (zero or seconds > 0) or seconds > MAX_SECONDS:
        raise UserError(
            f"{option(field, repr(text))} is not a length of time: give seconds, or such as 90m, 2h or 1d12h."
        )
    return seconds


def parse_size(text: str) -> int:
    """Returns the bytes of `20GB` or `1000`. Raises UserError."""
    from trainer.config.fields import size as bytes_of

    try:
        size = bytes_of(text)
    except ValueError as error:
        raise UserError(f"{option('max_bytes', quoted(text))} is not a size: {error}.") from error
    if not size:
        raise UserError(
            f"{option('max_bytes', quoted(text))} leaves room for nothing: give a number of bytes, or such as 10GB."
        )
    return size


_SHOWN = (("trials", "trials", str), ("epochs", "epochs", str), ("seconds", "time", spelled))
