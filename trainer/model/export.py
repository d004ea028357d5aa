"""A trained model as a file for others: safetensors, torch.export or ONNX, each checked by what it gives back.

The inputs are those of the task's own loss on samples of its training set. The first dimension of each may have any
size, where the model allows it.
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
from torch.utils._pytree import tree_leaves, tree_map

from trainer.config import TrainConfig
from trainer.data.loader import Fetch
from trainer.data.view import order
from trainer.errors import ConfigError, TrainerError
from trainer.files.durable import replacing, sync
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task, built

SAMPLES = 8
TOLERANCE = 1e-3  # of the largest output: beyond it an export is not the model


@dataclass(frozen=True)
class Inputs:
    """What the task's loss calls its model with, on `samples` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def named(self, model: nn.Module) -> dict[str, Any]:
        """By the names that the model's forward has for them."""
        return dict(inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments)

    def dynamic(self, model: nn.Module) -> dict[str, Any]:
        """For torch.export: the first dimension of each tensor is free unless the model fixes it."""
        free = torch.export.Dim.AUTO
        return tree_map(lambda x: {0: free} if isinstance(x, Tensor) and x.ndim else None, self.named(model))


@dataclass(frozen=True)
class Exported:
    """`difference` is the largest between the model's outputs and the file's, `free` whether any batch size will do;
    None where the file holds weights alone."""

    path: Path
    format: str
    size: int
    samples: int
    difference: float
    free: bool | None


class _Called(Exception):
    """The model was called."""


def inputs(task: Task, config: TrainConfig, model: nn.Module) -> Inputs:
    """What the task's loss gives `model`, on the first samples of its training set."""
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
    """Write `model`, in eval mode on the CPU, to `path`, and compare what the file gives with what it gives.

    `about` is kept in a safetensors file's header. Raises ConfigError for an unknown format, TrainerError where the
    file's outputs are not the model's, which leaves no file; and what torch raises where it cannot trace the model.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format {format!r} is not known: choose one of {', '.join(FORMATS)}.")
    given = inputs(task, config, model)
    with torch.no_grad(), replacing(path) as temporary:
        expected = _outputs(model(*given.args, **given.kwargs))
        got, free = FORMATS[format](task, model, given, temporary, about)
        difference = max((_difference(a, b) for a, b in zip(expected, got, strict=True)), default=0.0)
        largest = max((float(one.abs().max()) for one in expected if one.numel()), default=0.0)
        if not difference <= TOLERANCE * max(largest, 1e-6):
            raise TrainerError(
                f"the {format} file's outputs differ from the model's by {difference:.3g}, and the largest is "
                f"{largest:.3g}: it is not written."
            )
        sync(temporary)
        size = temporary.stat().st_size
    return Exported(path, format, size, given.samples, difference, free)


Written = tuple[list[Tensor], bool | None]  # what the file gives, and whether any batch size will do


def _safetensors(task: Task, model: nn.Module, given: Inputs, path: Path, about: dict[str, str]) -> Written:
    from safetensors.torch import load_model, save_model

    save_model(model, str(path), metadata=about)
    again = built(task).eval()
    load_model(again, path)
    return _outputs(again(*given.args, **given.kwargs)), None


def _traced(model: nn.Module, given: Inputs) -> tuple[torch.export.ExportedProgram, bool]:
    """The program, and whether the first dimension of one of its inputs is free."""
    program = torch.export.export(model, given.args, given.kwargs, dynamic_shapes=given.dynamic(model))
    return program, bool(program.range_constraints)


def _torch(task: Task, model: nn.Module, given: Inputs, path: Path, about: dict[str, str]) -> Written:
    program, free = _traced(model, given)
    with open(path, "wb") as file:
        torch.export.save(program, file)
    with open(path, "rb") as file:
        again = torch.export.load(file).module()
    return _outputs(again(*given.args, **given.kwargs)), free


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
    feeds = {one.name: x.numpy() for one, x in zip(session.get_inputs(), given.tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, feeds)], free


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's remarks on packages that are not there and on its own use of torch."""
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
