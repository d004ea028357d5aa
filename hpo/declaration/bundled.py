"""Names the bundled studies, whose code counts by a version; anything else in `studies/` belongs to a user."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BUNDLED = ("atft", "bert", "convnet", "dpo", "gpt", "lora", "mlp", "online", "t5")
# Packages of `studies/` -> the studies that import them.
SHARED = {"_lm": ("bert", "dpo", "gpt", "lora", "online", "t5")}
_STUDIES = Path(__file__).parents[2] / "studies"


def package_of(path: Path) -> str | None:
    """Returns the package of bundled studies that contains a file or directory; None if none does."""
    if not path.is_relative_to(_STUDIES):
        return None
    name = path.relative_to(_STUDIES).parts[:1]
    return name[0] if name and name[0] in (*BUNDLED, *SHARED) else None


def studies_in(paths: Iterable[Path]) -> list[str]:
    """Returns the bundled studies at these paths; if there are none, those that share the code there."""
    packages = {package for path in paths if (package := package_of(path))}
    named = sorted(packages.intersection(BUNDLED))
    return named or sorted({study for package in packages for study in SHARED[package]})
