"""What the platform knows of a study that was imported: what it searched and how it was judged, but no code."""

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

REFERENCE = "imported:"  # begins the reference of such a study, and its name follows
_TYPES: dict[str, type[Dimension]] = {one.__name__: one for one in (Float, Int, Choice)}


@dataclass(frozen=True)
class ImportedSpace:
    """The dimensions by name, without what a Space asks of names, which are another library's."""

    dimensions: Mapping[str, Dimension]


@dataclass(frozen=True)
class ImportedDeclaration:
    """What stands in the place of a Study for whoever only looks at trials."""

    space: ImportedSpace
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]


def declaration(spec: StudySpec) -> ImportedDeclaration:
    """The declaration of an imported study, from its specification."""
    assert spec.imported is not None
    return ImportedDeclaration(
        ImportedSpace({name: dimension(stored) for name, stored in spec.imported["space"].items()}),
        tuple(Objective(**one) for one in spec.objectives),
        tuple(Constraint(**one) for one in spec.constraints),
    )


def stored(one: Dimension) -> dict[str, Any]:
    """A dimension as JSON, which `dimension` reads."""
    described = one.describe()
    return {key: value for key, value in described.items() if key not in ("tier", "when", "prior", "strength")}


def dimension(described: Mapping[str, Any]) -> Dimension:
    """The dimension that `stored` has described."""
    given = dict(described)
    return _TYPES[given.pop("type")](**given)


def refuse(name: str) -> StudyError:
    """Why nothing of an imported study can be trained."""
    warm = command(f"run --study STUDY --warm-start {name}")
    return StudyError(
        f"study {name!r} was imported and has no code to train by, so it is never resumed or trained again: "
        f"`{warm}` lets a study of yours begin with what it has found."
    )
