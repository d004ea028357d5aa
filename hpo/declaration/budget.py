"""Bounds a study: trials, epochs and wall-clock time, each a total over all its resumptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpo.errors import UserError
from hpo.text import UNITS, spelled

_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
MAX_COUNT = 2**31 - 1  # what the ledger's columns hold
MAX_SECONDS = 3660 * 86400


@dataclass(frozen=True)
class Budget:
    """Bounds, None where there is none; the first that is reached ends the study.

    trials    asked for, but for those that were lost to the infrastructure
    epochs    trained by those trials. Trial n is asked for if the trials before it, once they have ended, have trained
              fewer than that; so the last trial may go beyond it, by less than its own length
    seconds   a driver has run. Trials that run when it is over are saved, and wait for a resume with more time
    """

    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, study: Mapping[str, Any]) -> Budget:
        """The one stored with a study's row."""
        return cls(study["requested"] or None, study["max_epochs"], study["max_seconds"])

    def columns(self) -> dict[str, Any]:
        """As the study's row holds it."""
        return {"requested": self.trials or 0, "max_epochs": self.epochs, "max_seconds": self.seconds}

    def __bool__(self) -> bool:
        return self != Budget()

    def over(self, stored: Budget) -> Budget:
        """What is given here, and for the rest what was stored."""
        mine = {name: value for name, value in vars(self).items() if value is not None}
        return Budget(**(vars(stored) | mine))

    def check(self, study: str, stored: Budget, used: Budget) -> None:
        """Raise UserError if a bound that is newly given lies below what is used already."""
        for name, flag, shown in _SHOWN:
            given, gone = getattr(self, name), getattr(used, name)
            if given is not None and given != getattr(stored, name) and given < gone:
                noun = "" if name == "seconds" else f" {name}"
                raise UserError(
                    f"{flag} {shown(given)}: study {study!r} has {shown(gone)}{noun} behind it; give that or more."
                )


def parse_time(text: str) -> float:
    """Seconds of `2h`, `90m`, `1d12h`, `1h30m` or `3600`. Raises UserError."""
    match = _TIME.fullmatch(text.strip().lower())
    parts = match.groups() if match else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, UNITS.values(), strict=False) if part)
    if not 0 < seconds <= MAX_SECONDS:
        raise UserError(f"--time {text!r} is not a length of time: give seconds, or such as 90m, 2h or 1d12h.")
    return seconds


_SHOWN = (("trials", "--trials", str), ("epochs", "--epochs", str), ("seconds", "--time", spelled))
