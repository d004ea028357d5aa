"""Converts the trials that release 0.2 copied from another study for samplers, and encodes configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.errors import SpaceError
from hpo.search.samplers.base import TrialRecord
from hpo.space.config import flatten
from hpo.space.space import Space
from hpo.space.values import same


def records(earlier: list[dict[str, Any]], constraints: int = 0) -> list[TrialRecord]:
    """Returns the earlier trials of a study's row as records for a sampler."""
    return [_record(number, trial, constraints) for number, trial in enumerate(earlier)]


def _record(number: int, trial: Mapping[str, Any], constraints: int) -> TrialRecord:
    violations = tuple(trial.get("violations") or (0.0,) * constraints)  # absent in rows older than the field
    state = "infeasible" if any(beyond > 0 for beyond in violations) else trial.get("state", "complete")
    curve = [(epoch, value) for epoch, value in trial.get("curve", ())]
    return TrialRecord(number, state, trial["coordinates"], tuple(trial["values"]), curve, violations=violations)


def encoded(space: Space, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the coordinates of a configuration, or None if the space does not contain it."""
    values = flatten(config)
    try:
        coordinates = space.encode(values, space.from_unit([0.5] * len(space)), strict=False)
    except SpaceError:
        return None
    decoded = space.decode(coordinates)
    return coordinates if all(same(values.get(path), value) for path, value in decoded.items()) else None
