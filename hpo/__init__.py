"""Hyperparameter search and experiment tracking for PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Bool", "Choice", "Constraint", "Float", "Int", "Objective", "Study", "__version__", "load"]

if TYPE_CHECKING:
    from hpo.driver import ray_tune as ray_tune
    from hpo.space.dimensions import Bool, Choice, Float, Int
    from hpo.space.objective import Constraint, Objective
    from hpo.study.declaration import Study
    from hpo.study.references import load

# Imported at first use, so that `import hpo` costs nothing.
_EXPORTS = {
    "Bool": "hpo.space.dimensions",
    "Choice": "hpo.space.dimensions",
    "Constraint": "hpo.space.objective",
    "Float": "hpo.space.dimensions",
    "Int": "hpo.space.dimensions",
    "Objective": "hpo.space.objective",
    "Study": "hpo.study.declaration",
    "load": "hpo.study.references",
}


def __getattr__(name: str) -> Any:
    if name == "ray_tune":  # which needs Ray
        return import_module("hpo.driver.ray_tune")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hpo' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
