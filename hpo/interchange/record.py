"""The one form into which every reader brings what another tool knows of a study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hpo.errors import UserError
from hpo.space.dimension import Dimension
from hpo.space.objective import Objective

State = Literal["complete", "pruned", "infeasible", "failed"]


class Point(NamedTuple):
    """A value of a metric at a step; `at` in seconds since the epoch where it is known."""

    step: int
    value: float
    at: float | None = None


@dataclass(frozen=True)
class ImportedTrial:
    """A trial that has ended elsewhere.

    key          the tool's own name of it, once in a study: by it a second import knows what is there
    params       name -> JSON value
    values       one for each objective; None where the tool has none
    dimensions   name -> what the tool searched, where it tells
    curves       metric -> points in the order of steps
    constraints  name -> value, kept where it is 0 or less
    started      seconds since the epoch, None where the tool does not tell; so is `ended`
    error        why it failed or was stopped
    attributes   what people or libraries have noted about it
    exact        what only a writer for the same tool reads
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
    label       the tool's own name of the study; trials of another label are never added to it
    source      where it was read, without passwords
    trials      in the order in which they get their numbers
    left        what is not carried, a clause each
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
    """The trials by key. Raises UserError where two share one."""
    found: dict[str, ImportedTrial] = {}
    for trial in trials:
        if trial.key in found:
            raise UserError(f"{source} has the trial {trial.key!r} twice: remove one of them.")
        found[trial.key] = trial
    return found


def judged_by(
    given: Sequence[str], directions: Sequence[str], known: Iterable[str], source: str, others: Sequence[str] = ()
) -> list[Objective]:
    """The objectives that --metric and --direction name, of the metrics that `source` has, or of its `others`, which
    may be metrics. Raises UserError."""
    metrics = sorted(known)
    if not given:
        there = f"it has {', '.join(metrics or others) or 'none'}"
        raise UserError(f"{source} does not say by which metric its trials are judged ({there}): name it by --metric.")
    if len(directions) > len(given):
        raise UserError(f"--direction is given {len(directions)} times, and --metric {len(given)}: give one for each.")
    for metric in given:
        if metric not in metrics:
            there = f"it has {', '.join(metrics)}" if metrics else "it has none"
            raise UserError(f"--metric {metric}: no trial of {source} has reported it; {there}.")
    return [
        Objective(metric, "maximize" if direction == "maximize" else "minimize")
        for metric, direction in zip(given, [*directions, *["minimize"] * len(given)], strict=False)
    ]
