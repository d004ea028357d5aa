"""Exports a trained model to a file: safetensors, torch.export or ONNX, each checked by its outputs.

The inputs are those of the task's own loss on samples of its training set. The first dimension of each may have any
size, if the model allows it.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat.pytree import tree_leaves, tree_map
from trainer.config import TrainConfig
from trainer.data.loader import Fetch
from trainer.data.view import order
from trainer.errors import ConfigError, TrainerError
from trainer.files.durable import replacing, sync
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task, built

SAMPLES = 8
TOLERANCE = 1e-3  # of the largest output: an export that differs more is refused


@dataclass(frozen=True)
class Inputs:
    """The arguments with which the task's loss calls its model, on `samples` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def named(self, model: nn.Module) -> dict[str, Any]:
        """Returns the arguments by the parameter names of the model's forward."""
        return dict(inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments)

    def dynamic(self, model: nn.Module) -> dict[str, Any]:
        """Returns torch.export's dynamic shapes: each tensor's first dimension is free unless the model fixes it."""
        free = torch.export.Dim.AUTO
        return tree_map(lambda x: {0: free} if isinstance(x, Tensor) and x.ndim else None, self.named(model))


@dataclass(frozen=True)
class Exported:
    """An exported file.

    `difference` is the largest difference between the model's outputs and the file's. `free` is True if the batch size
    is free; None if the file holds only weights.
    """

    path: Path
    format: str
    size: int
    samples: int
    difference: float
    free: bool | None


class _Called(Exception):
    """Raised when the model is called."""


def inputs(task: Task, config: TrainConfig, model: nn.Module) -> Inputs:
    """Returns the arguments that the task's loss gives `model`, on the first samples of its training set."""
    seed_all(derive(config.seed, "data"))
    data = task.train_set()
    indices = list(order(data, config.seed, 0, config.batch_size)[: min(SAMPLES, config.batch_size)])
    batch = Fetch(task, data, config)((0, indices))
    seen: list[Inputs] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        seen.append(Inputs(bound.args, bound.kwargs, len(indices)))
        raise _Called

    with torch.no_grad(), model.register_forward_pre_hook(catch, with_kwargs=True):
        try:
            task.loss(model, batch)
        except _Called:
            return seen[0]
    raise TrainerError(
        f"the loss of {type(task).__name__} never calls its model as a whole: there is nothing to trace."
    )


def export(
    task: Task, config: TrainConfig, model: nn.Module, format: str, path: Path, about: dict[str, str]
) -> Exported:
    """Writes `model`, in eval mode on the CPU, to `path`, and compares the file's outputs with the model's.

    `about` is kept in a safetensors file's header. Raises ConfigError for an unknown format, TrainerError if the
    outputs differ, which leaves no file, and torch's error if it cannot trace the model.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format {format!r} is not known: choose one of {', '.join(FORMATS)}.")
    example = inputs(task, config, model)
    with torch.no_grad(), replacing(path) as temporary:
        expected = _outputs(model(*example.args, **example.kwargs))
        got, free = FORMATS[format](task, model, example, temporary, about)
        difference = max((_difference(a, b) for a, b in zip(expected, got, strict=True)), default=0.0)
        largest = max((float(x.abs().max()) for x in expected if x.numel()), default=0.0)
        if not difference <= TOLERANCE * max(largest, 1e-6):
            raise TrainerError(
                f"the {format} file's outputs differ from the model's by {difference:.3g}, and the largest is "
                f"{largest:.3g}: it is not written."
            )
        sync(temporary)
        size = temporary.stat().st_size
    return Exported(path, format, size, example.samples, difference, free)


Written = tuple[list[Tensor], bool | None]  # the file's outputs, and True if any batch size will do


def _safetensors(task: Task, model: nn.Module, given: Inputs, path: Path, about: dict[str, str]) -> Written:
    from safetensors.torch import load_model, save_model

    if name := next((name for name, value in model.state_dict().items() if not isinstance(value, Tensor)), None):
        raise ConfigError(
            f"{name!r} of {type(model).__name__}, of its get_extra_state, fits into no safetensors file: export it by "
            "--format torch or onnx."
        )
    save_model(model, str(path), metadata=about)
    rebuilt = built(task).eval()
    rebuilt(*given.args, **given.kwargs)  # gives lazy layers their sizes
    load_model(rebuilt, path)
    return _outputs(rebuilt(*given.args, **given.kwargs)), None


def _traced(model: nn.Module, given: Inputs) -> tuple[torch.export.ExportedProgram, bool]:
    """Returns (the program, True if the first dimension of one of its inputs is free)."""
    program = torch.export.export(model, given.args, given.kwargs, dynamic_shapes=given.dynamic(model))
    return program, bool(program.range_constraints)


def _torch(task: Task, model: nn.Module, given: Inputs, path: Path, about: dict[str, str]) -> Written:
    program, free = _traced(model, given)
    with open(path, "wb") as file:
        torch.export.save(program, file)
    with open(path, "rb") as file:
        reloaded = torch.export.load(file).module()
    return _outputs(reloaded(*given.args, **given.kwargs)), free


def _onnx(task: Task, model: nn.Module, given: Inputs, path: Path, about: dict[str, str]) -> Written:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--format onnx needs {error.name}: pip install 'hpo[onnx]'.") from error
    program, free = _traced(model, given)
    with _quietly():
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None
        converted.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {node.name: x.numpy() for node, x in zip(session.get_inputs(), given.tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, feeds)], free


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences the exporter's remarks about missing packages and on its own use of torch."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


FORMATS: dict[str, Callable[[Task, nn.Module, Inputs, Path, dict[str, str]], Written]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
    "torch": _torch,
}


def _outputs(outputs: Any) -> list[Tensor]:
    return [x.float() for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
