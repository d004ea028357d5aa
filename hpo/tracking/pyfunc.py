"""Opens a promoted model for `mlflow.pyfunc.load_model`: the study's own code builds it, its weights are safetensors.

    MLmodel                  names this module, and the inputs and outputs where they are known
    requirements.txt         the versions that the study was trained with
    checkpoint/              config.json, manifest.json and the weights, as `Study.load_model` opens them
    checkpoint/study.json    the spec of the study, by which its declaration is found
    checkpoint/code/         the study's file and what it imports from beside it, where it is no study of the platform's

Nothing is unpickled; the study's code runs, so a model is opened as one would run a program of whoever promoted it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

SPEC, CODE = "study.json", "code"


class PyFuncModel:
    """What MLflow calls `predict` of; `model` is the torch model, in eval mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """The model's outputs as arrays: of an array, or of a mapping from the names of its inputs to arrays.

        The first dimension counts samples. What the model gives in a tuple or a dict comes in one.
        """
        import torch
        from torch.utils._pytree import tree_map

        if isinstance(model_input, Mapping):
            args, kwargs = (), {name: _tensor(value) for name, value in model_input.items()}
        else:
            args, kwargs = (_tensor(getattr(model_input, "values", model_input)),), {}
        with torch.no_grad():
            return tree_map(array, self.model(*args, **kwargs))


def _tensor(value: Any) -> Any:
    import numpy as np
    import torch

    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))


def array(value: Any) -> np.ndarray[Any, Any]:
    """A tensor as NumPy has it, which knows no bfloat16."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _load_pyfunc(path: str) -> PyFuncModel:
    """Called by MLflow with the directory `checkpoint`."""
    from hpo.declaration.resolved import ResolvedStudy

    directory = Path(path)
    spec = json.loads((directory / SPEC).read_text(encoding="utf-8"))
    if (directory / CODE).is_dir():
        spec["reference"] = str(directory / CODE / spec["reference"])
    model = ResolvedStudy.stored(spec).study.load_model(directory)
    return PyFuncModel(model)
