"""Defines objectives and constraints: the metrics by which trials are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpo.errors import StudyError
from hpo.space.values import is_number, plain

DIRECTIONS = ("minimize", "maximize")
SELECTIONS = ("last", "best")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


@dataclass(frozen=True)
class Objective:
    """A metric to minimize or maximize; `select` chooses its last value or the best of the curve."""

    metric: str
    direction: Literal["minimize", "maximize"] = "minimize"
    select: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        if not _is_name(self.metric):
            raise StudyError(f"objective {self.metric!r} must be the name of a metric, such as 'val/loss'.")
        for name, known in (("direction", DIRECTIONS), ("select", SELECTIONS)):
            if (value := getattr(self, name)) not in known:
                raise StudyError(f"objective {self.metric!r}: {name}={value!r} must be {' or '.join(known)}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Constraint:
    """A metric that must stay within bounds, both included: a trial that ends beyond them is infeasible."""

    metric: str
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        if not _is_name(self.metric):
            raise StudyError(f"constraint {self.metric!r} must be the name of a metric, such as 'val/latency'.")
        for name in ("lower", "upper"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        bounds = {name: bound for name in ("lower", "upper") if (bound := getattr(self, name)) is not None}
        if not bounds:
            raise StudyError(f"constraint {self.metric!r} has no bound: give lower, upper or both.")
        for name, bound in bounds.items():
            if not is_number(bound, (int, float)):
                raise StudyError(f"constraint {self.metric!r}: {name}={bound!r} must be a finite number.")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise StudyError(
                f"constraint {self.metric!r}: lower={self.lower!r} is above upper={self.upper!r}; swap them."
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def violation(self, value: float) -> float:
        """Returns the excess of a finite value over the bounds, relative to the bound unless that is 0; 0 or less
        within them."""
        beyond = [] if self.upper is None else [(value - self.upper) / (abs(self.upper) or 1.0)]
        beyond += [] if self.lower is None else [(self.lower - value) / (abs(self.lower) or 1.0)]
        return max(beyond)

    def broken_by(self, value: float) -> str:
        """Returns a clause about a value beyond the bounds."""
        above = self.upper is not None and value > self.upper
        bound = self.upper if above else self.lower
        return f"{self.metric} {value:g} is {'above' if above else 'below'} {bound:g}"


def check_judged(where: str, objectives: Sequence[Any], constraints: Sequence[Any]) -> None:
    """Raises StudyError, which begins with `where`, unless these objectives and constraints can judge a study."""
    if not objectives or not all(isinstance(objective, Objective) for objective in objectives):
        raise StudyError(f"{where}: objectives={objectives!r} must be a list of at least one Objective.")
    if not all(isinstance(constraint, Constraint) for constraint in constraints):
        raise StudyError(f"{where}: constraints={constraints!r} must be a list of Constraints.")
    metrics = [objective.metric for objective in objectives]
    if twice := [metric for metric in metrics if metrics.count(metric) > 1]:
        raise StudyError(f"{where} has the objective {twice[0]!r} twice; leave one of them out.")
    for objective in objectives[1:]:
        if objective.select == "best":
            raise StudyError(
                f"{where}: objective {objective.metric!r} has select='best', but all values of a trial are of one "
                "epoch, chosen by the first objective: put it first, or leave its select."
            )


def hold_out_of(metric: str) -> str | None:
    """Returns the held-out counterpart of `metric`, by which no trial is selected: `test/x` for `val/x`, or None."""
    area, slash, rest = metric.partition("/")
    return f"test/{rest}" if slash and area == "val" else None
