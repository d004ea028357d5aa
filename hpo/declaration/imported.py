"""Describes an imported study: what it searched and how it was judged, without its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.errors import StudyError
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.objective import Constraint, Objective
from hpo.text import command

if TYPE_CHECKING:
    from hpo.declaration.spec import StudySpec

REFERENCE = "imported:"  # prefix of the reference of such a study; its name follows
_TYPES: dict[str, type[Dimension]] = {kind.__name__: kind for kind in (Float, Int, Choice)}


@dataclass(frozen=True)
class ImportedSpace:
    """The dimensions by name, without a Space's rules on names, since the names come from another library."""

    dimensions: Mapping[str, Dimension]


@dataclass(frozen=True)
class ImportedDeclaration:
    """Stands in for a Study in code that only reads trials."""

    space: ImportedSpace
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]


def declaration(spec: StudySpec) -> ImportedDeclaration:
    """Returns the declaration of an imported study, from its specification."""
    assert spec.imported is not None
    return ImportedDeclaration(
        ImportedSpace({name: dimension(stored) for name, stored in spec.imported["space"].items()}),
        tuple(Objective(**objective) for objective in spec.objectives),
        tuple(Constraint(**constraint) for constraint in spec.constraints),
    )


def stored(one: Dimension) -> dict[str, Any]:
    """Returns a dimension as JSON, which `dimension` reads."""
    described = one.describe()
    return {key: value for key, value in described.items() if key not in ("tier", "when", "prior", "like", "strength")}


def dimension(described: Mapping[str, Any]) -> Dimension:
    """Returns the dimension that `stored` has described."""
    fields = dict(described)
    return _TYPES[fields.pop("type")](**fields)


def refuse(name: str) -> StudyError:
    """Returns the error that an imported study cannot be trained."""
    warm = command(f"run --study STUDY --warm-start {name}")
    return StudyError(
        f"study {name!r} was imported and has no code to train by, so it is never resumed or trained again: "
        f"`{warm}` lets a study of yours begin with what it has found."
    )
