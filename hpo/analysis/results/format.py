"""Formats numbers, durations and curves as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.progress import Trial
from hpo.space.objective import hold_out_of
from trainer.quote import visible

if TYPE_CHECKING:
    from hpo.ledger.queries import Judged


_BARS = "▁▂▃▄▅▆▇█"


def number(value: object) -> str:
    """Returns a float to four significant digits, anything else as text with its invisible characters escaped."""
    return f"{value:.4g}" if isinstance(value, float) else visible(str(value))


def judgement(
    values: Mapping[str, object],
    judged: Judged | None,
    last: int,
    shown: Callable[[Any], str] = number,
    *,
    saved: int | None = None,
) -> str:
    """Returns a trial's values such as `val/loss 0.21, test/loss 0.23 (epoch 3 of 4)`.

    The value of a held-out metric follows each objective, if it was measured. The epoch follows if it is not the last,
    or if the checkpoint shown with the values was `saved` at another.
    """
    beside = filter(None, map(hold_out_of, values))
    by_metric = {**values, **({key: judged.metrics.get(key) for key in beside} if judged else {})}
    text = ", ".join(
        f"{metric} {shown(value)}" for metric, value in by_metric.items() if value is not None and value == value
    )
    if judged is None or judged.epoch == last == (saved or last):
        return text
    return f"{text} (epoch {judged.epoch} of {last})"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Returns a whole curve in at most `width` blocks between its minimum and maximum.

    A block is one value or the mean of neighbours; it is a gap if none of them is finite.
    """
    count = min(width, len(values))
    ends = [i * len(values) // count for i in range(count + 1)] if count else []
    values = [_mean(values[begin:end]) for begin, end in pairwise(ends)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, half = min(finite), max(finite) / 2 - min(finite) / 2  # the difference may overflow a float

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BARS[round((value / 2 - low / 2) / half * (len(_BARS) - 1))] if half else _BARS[0]

    return "".join(block(value) for value in values)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(value / len(finite) for value in finite) if finite else math.nan


def epochs(trial: Trial) -> str:
    return f"{trial.epoch}/{trial.num_epochs}" if trial.num_epochs else str(trial.epoch)


def duration(seconds: float) -> str:
    """Returns text such as `4:05`, or `1:02:03` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
