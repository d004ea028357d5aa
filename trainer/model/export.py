"""Exports a trained model to a file: safetensors, torch.export or ONNX, each checked by its outputs.

The inputs are those of the task's own loss on samples of its training set. The first dimension of each may have any
size, if the model allows it.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import logging
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from trainer.model.exported import Exported, compared
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task, built

SAMPLES = 8
LARGEST = 64  # samples of a batch for which TensorRT's engine is made, if any batch size will do


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
        written = FORMATS[format](task, model, example, temporary, about)
        difference = compared(expected, written.outputs, format)
        sync(temporary)
        size = temporary.stat().st_size
    note = _for_tensorrt(path, written.shapes, example.samples) if written.shapes else ""
    return Exported(path, format, size, example.samples, difference, written.free, note)


Shape = Sequence[int | str]  # a text is the name of a free dimension


@dataclass(frozen=True)
class Written:
    """The outputs of a file that was loaded again.

    `free` is True if any batch size will do. `shapes` are those of an ONNX file's inputs, by their names.
    """

    outputs: list[Tensor]
    free: bool | None
    shapes: Mapping[str, Shape] = field(default_factory=dict)


def _for_tensorrt(path: Path, shapes: Mapping[str, Shape], samples: int) -> str:
    """Returns a sentence with the command by which TensorRT makes an engine of an ONNX file."""

    def sizes(batch: int) -> str:
        filled = {name: [size if isinstance(size, int) else batch for size in shape] for name, shape in free.items()}
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in filled.items())

    free = {name: shape for name, shape in shapes.items() if any(isinstance(size, str) for size in shape)}
    kinds = {"min": 1, "opt": samples, "max": LARGEST} if free else {}
    words = [f"--onnx={path}", f"--saveEngine={path.with_suffix('.engine')}"]
    words += [f"--{kind}Shapes={sizes(batch)}" for kind, batch in kinds.items()]
    return f"TensorRT, which was not tried here, makes an engine of it by `{shlex.join(['trtexec', *words])}`."


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
    return Written(_outputs(rebuilt(*given.args, **given.kwargs)), None)


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
    return Written(_outputs(reloaded(*given.args, **given.kwargs)), free)


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
    shapes = {node.name: node.shape for node in session.get_inputs()}
    return Written([torch.from_numpy(x) for x in session.run(None, feeds)], free, shapes)


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
