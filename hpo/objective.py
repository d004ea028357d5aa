"""What a study is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpo.errors import StudyError

DIRECTIONS = ("minimize", "maximize")
SELECTIONS = ("last", "best")


@dataclass(frozen=True)
class Objective:
    """A metric to minimise or maximise; `select` takes its last value or the best one of the curve."""

    metric: str
    direction: Literal["minimize", "maximize"] = "minimize"
    select: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        if not self.metric or not isinstance(self.metric, str):
            raise StudyError(f"objective {self.metric!r} must be the name of a metric, such as 'val/loss'.")
        for name, known in (("direction", DIRECTIONS), ("select", SELECTIONS)):
            if (value := getattr(self, name)) not in known:
                raise StudyError(f"objective {self.metric!r}: {name}={value!r} must be {' or '.join(known)}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rank(objective: Mapping[str, Any], number: int, value: float | None) -> tuple[bool, float, int]:
    """By this a trial's value is placed among others, best first: the lowest number among equals, what has none last.

    `objective` is one as `to_json` gives it.
    """
    if value is None or math.isnan(value):
        return True, 0.0, number
    return False, -value if objective["direction"] == "maximize" else value, number
