"""Ends a study whose best trial is good enough, or that no longer finds a better one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from hpo.declaration.budget import MAX_COUNT
from hpo.door import option
from hpo.errors import UserError
from hpo.search.forecast import HORIZON, Forecast, Seen, forecast
from hpo.space.values import plain
from hpo.text import command, counted

NONE = "none"  # removes the goal of an earlier run


class Ended(Protocol):
    """The columns of a trial's row that record how it has ended."""

    @property
    def number(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def values(self) -> Sequence[float] | None: ...


@dataclass(frozen=True)
class Goal:
    """The goal that ends a study before its budget does; a field that is None ends nothing.

    target    the value of the objective that a complete trial must reach
    patience  how many trials with a value may follow the best complete one
    gain      the improvement of the best value, expected of the next HORIZON trials, below which the study ends
    """

    target: float | None = None
    patience: int | None = None
    gain: float | None = None

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Goal:
        """Returns the goal that the environment of a study's row holds."""
        return cls(environment.get("target"), environment.get("patience"), environment.get("gain"))

    def to_json(self) -> dict[str, float]:
        """Returns the goal as the environment of a study's row stores it."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __bool__(self) -> bool:
        return self != NO_GOAL

    def changed(self, target: float | str | None, patience: float | str | None, stop_when: str | None) -> Goal:
        """Returns this goal with the fields replaced that are not None. Raises UserError for an argument that is
        neither a value nor none."""
        return Goal(
            self.target if target is None else _target(target),
            self.patience if patience is None else _patience(patience),
            self.gain if stop_when is None else _gain(stop_when),
        )

    @property
    def flag(self) -> str:
        """Returns the option that sets the goal, the first one if there are several."""
        if self.target is not None:
            return option("target", format(self.target, "g"))
        if self.patience is not None:
            return option("patience", self.patience)
        return option("stop_when", f"gain<{self.gain:g}")

    def bounds(self) -> list[str]:
        """Returns what ends the study: `the target 0.97`, `20 trials without improvement`, `a gain below 0.002`."""
        target = [] if self.target is None else [f"the target {self.target:g}"]
        patience = [] if self.patience is None else [f"{counted(self.patience, 'trial')} without improvement"]
        return target + patience + ([] if self.gain is None else [f"a gain below {self.gain:g}"])

    def check(self, objectives: Sequence[object], *, breeds: str = "") -> None:
        """Raises UserError if several objectives leave no best trial, or if a population `breeds` to its end."""
        if self and len(objectives) > 1:
            raise UserError(
                f"{self.flag}: the study has {len(objectives)} objectives, which leave several best trials: bound it "
                f"by {option('trials')}, {option('epochs')} or {option('time')}."
            )
        if self and breeds:
            raise UserError(
                f"{self.flag}: under {breeds} only trials of the last generation are complete: bound the study by "
                f"{option('trials')}, {option('epochs')} or {option('time')}."
            )


NO_GOAL = Goal()


class GoalWatch:
    """Judges trials in the order of tells, so that the end does not depend on the number of workers.

    A goal once `reached` stays reached, whatever trials end later.
    """

    def __init__(self, goal: Goal, objectives: Sequence[Mapping[str, object]], rows: Iterable[Ended] = ()) -> None:
        self._goal, self._objective = goal, objectives[0]
        self._best: tuple[int, float] | None = None
        self._since = 0  # trials with a value that followed the best one
        self._seen: tuple[Seen, ...] = ()  # where the goal is a gain
        self._forecast: Forecast | None = None
        self.reached = False
        for row in rows:
            self.note(row)

    def note(self, row: Ended) -> None:
        """Records how a trial ended."""
        if self.reached or not self._goal or row.state not in ("complete", "pruned") or row.values is None:
            return
        if row.state == "complete" and self._improves(row.values[0]):
            self._best, self._since = (row.number, row.values[0]), 0
        else:
            self._since += self._best is not None
        self.reached = self._target_reached() or self._since == self._goal.patience or self._gains_too_little(row)

    def ahead(self, rows: Iterable[Ended]) -> GoalWatch:
        """Returns a watch that has also seen `rows` if they reach the goal, else this one."""
        watch = copy(self)
        for row in rows:
            watch.note(row)
        return watch if watch.reached else self

    def explain(self, study: str) -> str:
        """Returns why the study has ended, with the command to continue; empty if the goal is not reached."""
        if not self.reached or self._best is None:
            return ""
        number, value = self._best
        best = f"trial {number}, whose {self._objective['metric']} is {value:.6g}"
        if self._target_reached():
            resumes = command(f"resume --study {study} --target {NONE}")
            return f"the target {self._goal.target:g} is reached by {best}: `{resumes}` goes on without a target."
        if self._forecast is not None and self._goal.gain is not None and self._forecast.gain < self._goal.gain:
            resumes = command(f"resume --study {study} --stop-when {NONE}")
            return (
                f"after {len(self._seen)} trials with a value the next {HORIZON} were expected to improve on {best}, "
                f"by {self._forecast.gain:.2g}, less than the {self._goal.gain:g} of {option('stop_when')}: "
                f"`{resumes}` goes on."
            )
        resumes = command(f"resume --study {study} --patience {2 * self._since}")
        return f"{counted(self._since, 'trial')} without improvement on {best}: `{resumes}` goes on."

    def _improves(self, value: float) -> bool:
        return self._best is None or self._sign * value < self._sign * self._best[1]

    def _target_reached(self) -> bool:
        if self._goal.target is None or self._best is None:
            return False
        return self._sign * self._best[1] <= self._sign * self._goal.target

    def _gains_too_little(self, row: Ended) -> bool:
        if self._goal.gain is None or row.values is None:
            return False
        self._seen = *self._seen, Seen(self._sign * row.values[0], row.state == "complete")
        self._forecast = forecast(self._seen)
        return self._forecast is not None and self._forecast.gain < self._goal.gain

    @property
    def _sign(self) -> int:
        return 1 if self._objective["direction"] == "minimize" else -1


def _target(asked: float | str) -> float | None:
    if asked == NONE:
        return None
    try:
        value = math.nan if isinstance(asked, bool) else float(asked)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{option('target', repr(asked))}: give the value that the objective is to reach, or {NONE}.")
    return value


def _patience(value: float | str) -> int | None:
    if value == NONE:
        return None
    value = plain(value)
    digits = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) < 11 and 1 <= int(digits) <= MAX_COUNT):
        raise UserError(
            f"{option('patience', repr(value))}: give the number of trials without improvement that ends the study, "
            "from 1 on, or "
            f"{NONE}."
        )
    return int(digits)


def _gain(asked: str) -> float | None:
    if asked == NONE:
        return None
    match = re.fullmatch(r"\s*gain\s*<\s*(\S+)\s*", asked) if isinstance(asked, str) else None
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(
            f"{option('stop_when', repr(asked))}: give gain<VALUE, such as gain<0.002, to end the study once its next "
            f"{HORIZON} trials are expected to improve the best value by less, or {NONE}."
        )
    return value
