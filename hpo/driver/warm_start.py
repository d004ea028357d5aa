"""Reads the trials of another study for a warm start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpo.declaration.study import Study
from hpo.errors import SpaceError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.history import Curves
from hpo.search.samplers.base import TrialRecord
from hpo.space.config import flatten
from hpo.space.space import Space
from hpo.space.values import same
from hpo.text import counted
from trainer.report import Outcome


def found(ledger: Ledger, name: str, study: Study) -> tuple[list[dict[str, Any]], int]:
    """What study `name` gives the sampler of `study`, as JSON, in order, and how many complete trials it has.

    A trial is taken, complete or stopped early, with its curve, whose configuration has, for every dimension that is
    active there, a value that the space holds, and that has reported what this study judges by: its value and by how
    much it breaks the constraints are those that it would have here. One whose parameters changed in the middle of
    training is not, since they have not earned its value; nor is one that was stopped and that another went on from.
    Raises UserError where the studies are judged by different metrics, or no trial is taken.
    """
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        judged = [f"{one['direction']} {one['metric']}" for one in row["spec"]["objectives"]]
        if judged != [f"{one.direction} {one.metric}" for one in study.objectives]:
            raise UserError(
                f"--warm-start {name}: its trials are judged by {', '.join(judged)}, and this study's are not; name "
                "one with the same objective."
            )
        trials = queries.trial_rows(connection, row["id"])
        changed = queries.changed(trials)
        parents = {one["parent"] for one in trials}
        complete = [one for one in trials if one["state"] == "complete"]
        stopped = [one for one in trials if one["state"] == "pruned" and one["number"] not in parents]
        configs = queries.configs(connection, [one["id"] for one in (*complete, *stopped)])
        curves, taken = Curves(row["id"], study.objectives, study.constraints), list[dict[str, Any]]()
        for one in sorted((*complete, *stopped), key=lambda one: one["number"]):
            if one["number"] in changed or not (coordinates := place(study.space, configs[one["id"]])):
                continue
            end = curves.judge(connection, one["id"], Outcome(one["state"], one["step"], one["epoch"]))
            if end.values and (end.violations or not study.constraints):
                known = {"coordinates": coordinates, "values": end.values, "violations": end.violations or []}
                several = len(study.objectives) > 1
                points = [] if several else curves.of(connection, one["id"])
                curve = [[epoch, curves.flipped([loss])] for epoch, loss in points if math.isfinite(loss)]
                taken.append(known | {"state": one["state"], "curve": curve})
    if not taken:
        keys = dict.fromkeys(one.metric for one in (*study.objectives, *study.constraints))
        raise UserError(
            f"--warm-start {name}: of its {counted(len(configs), 'trial')} none fits the space of this study "
            f"and has reported all of {', '.join(keys)}, by which it judges."
        )
    return taken, len(complete)


def records(earlier: list[dict[str, Any]], constraints: int = 0) -> list[TrialRecord]:
    """What `found` has found, as a sampler takes it."""
    return [_record(number, one, constraints) for number, one in enumerate(earlier)]


def _record(number: int, one: Mapping[str, Any], constraints: int) -> TrialRecord:
    violations = tuple(one.get("violations") or (0.0,) * constraints)  # none: older than this reading of them
    state = "infeasible" if any(beyond > 0 for beyond in violations) else one.get("state", "complete")
    curve = [(epoch, value) for epoch, value in one.get("curve", ())]
    return TrialRecord(number, state, one["coordinates"], tuple(one["values"]), curve, violations=violations)


def place(space: Space, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a configuration lies in the space; None where it does not."""
    values = flatten(config)
    try:
        found = space.encode(values, space.from_unit([0.5] * len(space)), strict=False)
    except SpaceError:
        return None
    return found if all(same(values.get(path), value) for path, value in space.decode(found).items()) else None
