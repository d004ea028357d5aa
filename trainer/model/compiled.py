"""Compiles a model (`train.compile`) so that a resumed run computes each batch like an uninterrupted one.

Each shape of the model's inputs is compiled separately, and compiled code rounds differently from the model's own.
Torch compiles the first shapes that a process meets and computes all others uncompiled. A resumed run meets them in
another order, so here the compiled shapes are state: the first `MOST` of the run.

With `train.compile=graphs` the kernels of a compiled shape are also recorded as a CUDA graph, and later calls replay
it. Each replay writes its outputs and gradients to the same memory, so no result of a micro-batch may stay there when
the next one begins: a number that the model returns, such as its loss, is copied at once, and gradients are copied
before the second micro-batch of a window adds to them.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.compat.compiler import compile_errors, counted, patched_config
from trainer.compat.pytree import tree_flatten, tree_map_only
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.quote import visible

MOST = 8  # shapes; as many as torch compiles by itself
_AGAIN = 64  # compilations of shapes that were compiled before


def records_graphs(config: TrainConfig, device: torch.device) -> bool:
    """Returns True if CUDA graphs are set and can be recorded."""
    return config.compile == "graphs" and device.type == "cuda"


def without_graphs(config: TrainConfig, device: torch.device) -> str:
    """Returns a sentence if graphs are set and the device has none; else an empty text."""
    if config.compile != "graphs" or records_graphs(config, device):
        return ""
    return f"train.compile=graphs records CUDA graphs and this device is a {device.type}: here it does what true does."


class Compiled:
    """The compiled `model` as `module`; `shapes` are digests of the shapes that it is compiled for, in order."""

    def __init__(self, model: nn.Module, on_event: Callable[..., None], graphs: bool = False) -> None:
        self.shapes: list[str] = []
        mode = "reduce-overhead" if graphs else None
        self.module, self._graphs = cast(nn.Module, torch.compile(model, dynamic=False, mode=mode)), graphs
        self._model, self._on_event = model, on_event
        self._compiled: Callable[..., Any] = self.module.forward
        self.module.forward = self._forward
        self._met: set[str] = set()  # in this process
        self._again, self._told = 0, False
        self._skips: int | None = _counted("inductor", "cudagraph_skips") if graphs else None

    def load(self, shapes: list[str]) -> None:
        self.shapes = list(shapes)

    def begin(self, micro_step: int, params: Iterable[nn.Parameter]) -> None:
        """Begins a micro-batch: results of the window's earlier ones are no longer in a graph's memory."""
        if not self._graphs:
            return
        if micro_step == 1:  # later ones add to the copies
            for p in params:
                p.grad = None if p.grad is None else p.grad.clone()
        torch.compiler.cudagraph_mark_step_begin()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        shape = _shape(args, kwargs, self._model.training)
        if self._again >= _AGAIN or not self._admits(shape):
            return self._model(*args, **kwargs)
        before = _counted("stats", "unique_graphs")
        output = self._compute(*args, **kwargs)
        if shape in self._met and _counted("stats", "unique_graphs") > before:
            self._count_again()
        self._met.add(shape)
        if not self._graphs:
            return output
        self._tell_skipped()
        return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.numel() == 1 else tensor, output)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the compiled model returns. Raises ConfigError if torch cannot compile it."""
        try:
            return self._compiled(*args, **kwargs)
        except compile_errors() as error:
            reason = textwrap.shorten(visible(str(error)), 400, placeholder=" ...")
            raise ConfigError(
                f"train.compile: torch cannot compile the model: {reason} Leave train.compile out to train uncompiled."
            ) from error

    def _admits(self, shape: str) -> bool:
        if shape in self.shapes:
            return True
        if len(self.shapes) < MOST:
            self.shapes.append(shape)
            return True
        if not self._told:
            self._told = True
            reason = (
                f"batches have come in more than {MOST} shapes, and train.compile compiles the model for the first "
                f"{MOST} of them; the others are computed uncompiled: give batches fewer shapes, by padding say."
            )
            self._on_event("compiled_shapes", most=MOST, reason=reason)
        return False

    def _tell_skipped(self) -> None:
        """Reports once that torch does not record some part of the model as a graph."""
        if self._skips is not None and _counted("inductor", "cudagraph_skips") > self._skips:
            self._skips = None
            reason = (
                "torch does not record all of the model as CUDA graphs, since it copies between devices or changes its "
                "inputs say; the rest is launched as with train.compile=true: TORCH_LOGS=perf_hints names the line."
            )
            self._on_event("graphs_skipped", reason=reason)

    def _count_again(self) -> None:
        self._again += 1
        if self._again == _AGAIN:
            reason = (
                f"the model was compiled {_AGAIN} times for shapes that it was compiled for before, as an attribute of "
                "it changes say; from here on it is computed uncompiled, and a resumed run may differ in its last "
                "bits: keep what changes in a tensor, or leave train.compile out."
            )
            self._on_event("compiled_again", times=_AGAIN, reason=reason)


def unlimited() -> AbstractContextManager[object]:
    """Returns a context in which torch itself does not stop compiling.

    Torch's limit also counts compilations of the process's earlier trials, and beyond it torch silently stops
    compiling.
    """
    return patched_config(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> str:
    leaves, spec = tree_flatten((args, kwargs))
    parts = [str(spec), training, torch.is_grad_enabled(), *map(_part, leaves)]
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _part(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), str(leaf.dtype), leaf.device.type, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__qualname__


def _counted(group: str, name: str) -> int:
    """Returns this process's count `name` of the compiler, such as the graphs that it has compiled."""
    return counted(group, name)
