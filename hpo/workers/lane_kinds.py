"""Which of a study's trials are alike, so that they may train as lanes of one model. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hpo.declaration.resolved import ResolvedStudy
from hpo.space.space import Space
from trainer.config.lanes import LANE_FIELDS

LEAST = 4  # lanes of a group: fewer take longer together than one after the other (docs/performance.md)


def kinds(space: Space, fields: Collection[str]) -> Mapping[str, float]:
    """How many values each dimension has in which lanes may not differ, where a task adds these `fields`."""
    may = (*LANE_FIELDS, *fields)
    others = {path: one for path, one in space.dimensions.items() if not _varies(path, may)}
    return {path: one.count for path, one in others.items() if one.count > 1}


def alike(resolved: ResolvedStudy, lanes: int, fields: Collection[str]) -> float:
    """How many of so many lanes can be of one kind, on average.

    With rungs in order no group takes a trial beyond a waiting one of another kind (docs/decisions/0036), so all have
    to be of one kind; else kinds share the lanes evenly.
    """
    count = math.prod(kinds(resolved.study.space, fields).values())
    in_order = resolved.spec.order == "ordered" and resolved.strategy.name != "none"
    return lanes if count == 1 else 0 if in_order else lanes / count


def _varies(path: str, fields: Collection[str]) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in fields)
