"""Hyperparameter search and experiment tracking for PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpo.version import VERSION as __version__

__all__ = [
    "Bool",
    "Choice",
    "Constraint",
    "Float",
    "HpoError",
    "Int",
    "Objective",
    "Study",
    "StudyHandle",
    "Trial",
    "__version__",
    "import_study",
    "load",
    "open",
    "resume",
    "run",
    "study",
]

if TYPE_CHECKING:
    from hpo import ray_tune as ray_tune
    from hpo.analysis.study_handle import StudyHandle
    from hpo.api import import_study, open, resume, run
    from hpo.declaration.function import study
    from hpo.declaration.function_trial import Trial
    from hpo.declaration.references import load
    from hpo.declaration.study import Study
    from hpo.errors import HpoError
    from hpo.space.dimensions import Bool, Choice, Float, Int
    from hpo.space.objective import Constraint, Objective

# Imported at first use, so that `import hpo` costs nothing.
_EXPORTS = {
    "Bool": "hpo.space.dimensions",
    "Choice": "hpo.space.dimensions",
    "Constraint": "hpo.space.objective",
    "Float": "hpo.space.dimensions",
    "HpoError": "hpo.errors",
    "Int": "hpo.space.dimensions",
    "Objective": "hpo.space.objective",
    "Study": "hpo.declaration.study",
    "StudyHandle": "hpo.analysis.study_handle",
    "Trial": "hpo.declaration.function_trial",
    "import_study": "hpo.api",
    "load": "hpo.declaration.references",
    "open": "hpo.api",
    "resume": "hpo.api",
    "run": "hpo.api",
    "study": "hpo.declaration.function",
}


def __getattr__(name: str) -> Any:
    if name == "ray_tune":  # which needs Ray
        return import_module("hpo.ray_tune")
    if name not in _EXPORTS:
        from hpo.space import optuna_names

        raise optuna_names.missing("module hpo", name, optuna_names.OF_HPO)
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
