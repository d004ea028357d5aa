"""Opens a promoted model for `mlflow.pyfunc.load_model`: the study's code builds it, its weights are safetensors.

    MLmodel                  names this module, and the inputs and outputs where they are known
    requirements.txt         the versions that the study was trained with
    checkpoint/              config.json, manifest.json and the weights, as `Study.load_model` opens them
    checkpoint/study.json    the spec of the study, which names its declaration
    checkpoint/code/         the study's file and the modules beside it that it imports, unless the study is bundled

Nothing is unpickled, but the study's code runs: open a model only from somebody whose programs you would run.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnusedFunction=false
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
    """The object that MLflow calls `predict` on; `model` is the torch model, in eval mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, object] | None = None) -> Any:
        """Returns the model's outputs as arrays, from an array or a mapping of input names to arrays.

        The first dimension counts samples. Outputs in a tuple or a dict keep that structure.
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
    """Returns a tensor as a NumPy array; bfloat16 becomes float32, since NumPy lacks it."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _load_pyfunc(path: str) -> PyFuncModel:
    """Opens the model in the directory `checkpoint`; MLflow calls this."""
    from hpo.declaration.resolved import ResolvedStudy

    directory = Path(path)
    spec = json.loads((directory / SPEC).read_text(encoding="utf-8"))
    if (directory / CODE).is_dir():
        spec["reference"] = str(directory / CODE / spec["reference"])
    model = ResolvedStudy.stored(spec).study.load_model(directory)
    return PyFuncModel(model)
