"""Holds the mean of several trainings with its standard error, and says whether a difference may be chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from hpo.text import counted

MOST_SEEDS = 30  # a difference that needs more is too small to matter


@dataclass(frozen=True)
class Spread:
    """A mean and its standard error; None where there is only one value."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Returns the spread of the finite values; None where no value is finite."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return None
        return cls(fmean(known), stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None, len(known))

    @classmethod
    def of_pairs(
        cls, values: Sequence[float | None], before: Sequence[float | None], sign: float = 1.0
    ) -> Spread | None:
        """Returns the spread of `sign` * (value - value before) over the pairs that have both."""
        pairs = zip(values, before, strict=False)
        return cls.of([None if a is None or b is None else sign * (a - b) for a, b in pairs])

    def interval(self, count: int | None = None) -> tuple[float, float]:
        """Returns the 95 % confidence interval of the mean by Student's t; it is unbounded for a single value.

        count  the number of values of this deviation to assume; by default the number that there were
        """
        from scipy.special import stdtrit

        if self.error is None:
            return -math.inf, math.inf
        wanted = count or self.count
        reach = float(stdtrit(wanted - 1, 0.975)) * self.error * math.sqrt(self.count / wanted)
        return self.mean - reach, self.mean + reach

    def described(self, of: str) -> str:
        """Returns `+0.012 (standard error 0.0042, n = 3 seeds)`, signed."""
        error = "" if self.error is None else f"standard error {self.error:.2g}, "
        return f"{self.mean:+.3g} ({error}n = {counted(self.count, of)})"

    def against(self, other: str) -> str:
        """Returns `better than OTHER by 0.012 (...)`, or worse, for a difference in favour of the first."""
        side, size = ("better", self) if self.mean >= 0 else ("worse", Spread(-self.mean, self.error, self.count))
        return f"{side} than {other} by {size.described('seed').removeprefix('+')}"

    def __str__(self) -> str:
        return f"{self.mean:.5g}" + (f" ± {self.error:.2g}" if self.error is not None else "")


def seeds_needed(ahead: Spread) -> int | None:
    """Returns the fewest seeds whose interval excludes 0 if mean and deviation stay; None above MOST_SEEDS."""
    return next((n for n in range(ahead.count + 1, MOST_SEEDS + 1) if ahead.interval(n)[0] > 0), None)


def doubt(ahead: Spread | None, first: str, second: str, fix: str) -> str:
    """Returns a sentence that a difference may be chance; empty where the 95 % interval is above 0 or unknown.

    `fix` names the seeds that would tell the two apart if the difference stays as it is, in place of its `{}`.
    """
    if ahead is None or ahead.error is None or ahead.interval()[0] > 0:
        return ""
    low, high = ahead.interval()
    needed = seeds_needed(ahead)
    return (
        f"{counted(ahead.count, 'seed')} cannot tell {first} from {second}: the 95 % interval of the difference is "
        f"{low:+.2g} to {high:+.2g}; {f'{fix.format(needed)} may tell' if needed else 'either will do'}"
    )
