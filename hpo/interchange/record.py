"""Holds the common form into which every reader converts another tool's study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hpo.door import option
from hpo.errors import UserError
from hpo.space.dimension import Dimension
from hpo.space.objective import Objective

State = Literal["complete", "pruned", "infeasible", "failed"]


class Point(NamedTuple):
    """A value of a metric at a step; `at` is in seconds since the epoch, None if unknown."""

    step: int
    value: float
    at: float | None = None


@dataclass(frozen=True)
class ImportedTrial:
    """A trial that has ended in another tool.

    key          the tool's name for it, unique in a study; a second import recognizes trials by it
    params       name -> JSON value
    values       one for each objective; None if the tool has none
    dimensions   name -> the dimension that the tool searched, if known
    curves       metric -> points in the order of steps
    constraints  name -> value, satisfied if it is 0 or less
    started      seconds since the epoch, None if unknown; likewise `ended`
    error        why it failed or was stopped
    attributes   notes that people or libraries attached to it
    exact        data that only an export to the same tool reads
    """

    key: str
    state: State
    params: Mapping[str, Any]
    values: Sequence[float] | None = None
    dimensions: Mapping[str, Dimension] = field(default_factory=dict[str, Dimension])
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict[str, Sequence[Point]])
    constraints: Mapping[str, float] = field(default_factory=dict[str, float])
    started: float | None = None
    ended: float | None = None
    error: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exact: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ImportedStudy:
    """A study of another tool.

    tool        the reader's name: optuna, mlflow, wandb, ray or csv
    label       the tool's name for the study; trials of another label are never added to it
    source      where it was read, without passwords
    trials      in the order in which they get their numbers
    left        what is not imported, a clause each
    guessed     what the reader had to guess, a clause each
    """

    tool: str
    label: str
    source: str
    objectives: tuple[Objective, ...]
    trials: Sequence[ImportedTrial]
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left: Sequence[str] = ()
    guessed: Sequence[str] = ()


def by_key(trials: Iterable[ImportedTrial], source: str) -> dict[str, ImportedTrial]:
    """Returns the trials by key. Raises UserError if two share a key."""
    trial_of: dict[str, ImportedTrial] = {}
    for trial in trials:
        if trial.key in trial_of:
            raise UserError(f"{source} has the trial {trial.key!r} twice: remove one of them.")
        trial_of[trial.key] = trial
    return trial_of


def judged_by(
    given: Sequence[str], directions: Sequence[str], known: Iterable[str], source: str, others: Sequence[str] = ()
) -> list[Objective]:
    """Returns the objectives that --metric and --direction name.

    The metrics must be among those that `source` has (`known`); `others` may be metrics, and are listed in the error if
    no metric is given. Raises UserError.
    """
    metrics = sorted(known)
    if not given:
        offered = f"it has {', '.join(metrics or others) or 'none'}"
        raise UserError(
            f"{source} does not say by which metric its trials are judged ({offered}): name it by {option('metric')}."
        )
    if len(directions) > len(given):
        raise UserError(
            f"{option('direction')} is given {len(directions)} times, and {option('metric', len(given))}: give one "
            "for each."
        )
    for metric in given:
        if metric not in metrics:
            offered = f"it has {', '.join(metrics)}" if metrics else "it has none"
            raise UserError(f"{option('metric', metric)}: no trial of {source} has reported it; {offered}.")
    return [
        Objective(metric, "maximize" if direction == "maximize" else "minimize")
        for metric, direction in zip(given, [*directions, *["minimize"] * len(given)], strict=False)
    ]
