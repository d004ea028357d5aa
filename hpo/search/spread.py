"""Holds the mean of several trainings with its standard error, and says which configuration has the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
        """Returns `+0.012 (standard error 0.0042, n = 3 seeds)`, signed; `+0.012 (the same for each of 3 seeds)` where
        all values are equal up to rounding."""
        if self.error is not None and self.error <= 1e-12 * abs(self.mean):
            return f"{self.mean:+.3g} (the same for each of {counted(self.count, of)})"
        error = "" if self.error is None else f"standard error {self.error:.2g}, "
        return f"{self.mean:+.3g} ({error}n = {counted(self.count, of)})"

    def against(self, other: str) -> str:
        """Returns `better than OTHER by 0.012 (...)`, or worse; without `than OTHER` where that is empty."""
        side, size = ("better", self) if self.mean >= 0 else ("worse", Spread(-self.mean, self.error, self.count))
        than = f" than {other}" if other else ""
        return f"{side}{than} by {size.described('seed').removeprefix('+')}"

    def __str__(self) -> str:
        return f"{self.mean:.5g}" + (f" ± {self.error:.2g}" if self.error is not None else "")


def seeds_needed(ahead: Spread) -> int | None:
    """Returns the fewest seeds whose interval excludes 0 if mean and deviation stay; None above MOST_SEEDS."""
    return next((n for n in range(ahead.count + 1, MOST_SEEDS + 1) if ahead.interval(n)[0] > 0), None)


def doubt(ahead: Spread | None, first: str, second: str, more: Callable[[int], str]) -> str:
    """Returns a sentence that a difference may be chance; empty where the 95 % interval is above 0 or unknown.

    `more` names what trains the seeds that would tell the two apart if the difference stays as it is.
    """
    if ahead is None or ahead.error is None or ahead.interval()[0] > 0:
        return ""
    low, high = ahead.interval()
    needed = seeds_needed(ahead)
    return (
        f"{counted(ahead.count, 'seed')} cannot tell {first} from {second}: {first} is {ahead.against('')}, "
        f"seed by seed, and the 95 % interval of the difference is {low:+.2g} to {high:+.2g}; "
        f"{f'{more(needed)} may tell them apart' if needed else 'either will do'}"
    )


@dataclass(frozen=True)
class Rival:
    """Another configuration beside the best trial: its values under other seeds, and how much better the trial is."""

    name: str
    again: Spread
    ahead: Spread

    @property
    def leads(self) -> bool:
        """Returns whether its mean over the common seeds is better than that of the best trial."""
        return self.ahead.mean < 0

    @property
    def wins(self) -> bool:
        """Returns whether it is better than the best trial by the 95 % interval of the difference."""
        return self.ahead.interval()[1] < 0

    @property
    def lead(self) -> Spread:
        """Returns how much better the better one of the two is."""
        return replace(self.ahead, mean=abs(self.ahead.mean))

    def doubt(self, trial: str, more: Callable[[int], str]) -> str:
        """Returns the sentence that this configuration and `trial` cannot be told apart; empty where they can."""
        first, second = (self.name, trial) if self.leads else (trial, self.name)
        return doubt(self.lead, first, second, more)

    def compared(self, trial: str, more: Callable[[int], str]) -> str:
        """Returns a sentence on which of the two is better."""
        first, second = (self.name, trial) if self.leads else (trial, self.name)
        unconfirmed = ", which one seed cannot confirm" if self.ahead.error is None else ""
        return self.doubt(trial, more) or f"{first} is {self.lead.against(second)}, seed by seed{unconfirmed}"


def nearest(rivals: Sequence[Rival]) -> list[Rival]:
    """Returns the rivals, the one with the best mean first: it and the best trial are the first two of all."""
    return sorted(rivals, key=lambda rival: rival.ahead.mean)


def standing(trial: str, again: Spread, rivals: Sequence[Rival], more: Callable[[int], str]) -> list[str]:
    """Returns sentences on which configuration has the best mean under other seeds, and whether it is the best."""
    ranked = nearest(rivals)
    leaders = [(rival.name, rival.again) for rival in ranked if rival.leads] + [(trial, again)]
    means = "; then ".join(f"{name}, {spread}" for name, spread in leaders)
    return [f"best mean under other seeds: {means}", *(rival.compared(trial, more) for rival in ranked)]
