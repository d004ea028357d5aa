"""Names the bundled studies, whose code counts by a version; anything else in `studies/` is a user's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BUNDLED = ("atft", "convnet", "dpo", "gpt", "lora", "mlp")
SHARED = {"_lm": ("dpo", "gpt", "lora")}  # packages of `studies/` that several of them import
_STUDIES = Path(__file__).parents[2] / "studies"


def package_of(place: Path) -> str | None:
    """Returns the package of the bundled studies that a file or directory lies in, if it lies in one."""
    if not place.is_relative_to(_STUDIES):
        return None
    name = place.relative_to(_STUDIES).parts[:1]
    return name[0] if name and name[0] in (*BUNDLED, *SHARED) else None


def studies_in(places: Iterable[Path]) -> list[str]:
    """Returns the bundled studies that these places are of; code that several share is of each, where none is named."""
    packages = {package for place in places if (package := package_of(place))}
    named = sorted(packages.intersection(BUNDLED))
    return named or sorted({study for package in packages for study in SHARED[package]})
