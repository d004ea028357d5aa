"""Groups a study's trials into kinds that can train as lanes of one model. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hpo.declaration.resolved import ResolvedStudy
from hpo.space.space import Space
from trainer.config.lanes import LANE_FIELDS

LEAST = 4  # lanes of a group: fewer take longer together than one after another (docs/performance.md)


def kinds(space: Space, fields: Collection[str]) -> Mapping[str, float]:
    """Returns the number of values of each dimension in which lanes may not differ; a task adds `fields` that may."""
    may = (*LANE_FIELDS, *fields)
    fixed = {path: dimension for path, dimension in space.dimensions.items() if not _varies(path, may)}
    return {path: dimension.count for path, dimension in fixed.items() if dimension.count > 1}


def alike(resolved: ResolvedStudy, lanes: int, fields: Collection[str]) -> float:
    """Returns how many of this many lanes are of one kind, on average.

    With rungs in order no group takes a trial past a waiting trial of another kind (docs/decisions/0036), so all must
    be of one kind; else kinds share the lanes evenly.
    """
    count = math.prod(kinds(resolved.study.space, fields).values())
    in_order = resolved.spec.order == "ordered" and resolved.strategy.name != "none"
    return lanes if count == 1 else 0 if in_order else lanes / count


def _varies(path: str, fields: Collection[str]) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in fields)
