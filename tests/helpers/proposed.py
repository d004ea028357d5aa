"""The coordinates that a sampler proposes which rounds: those of an oracle to 8 significant digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.search.samplers.rounding import rounded
from hpo.space.space import Space


def as_proposed(space: Space, coordinates: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the coordinates rounded as version 2 of tpe, gp, cmaes, bohb and freeze-thaw rounds them."""
    return {path: rounded(space.coordinates[path], value) for path, value in coordinates.items()}
