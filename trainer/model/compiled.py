"""Compiles a model (`train.compile`) so that a resumed run computes each batch as the uninterrupted one does.

Each shape of what the model is called with is compiled by itself, and compiled code rounds otherwise than the model's
own. Torch compiles the first shapes that a process meets and computes all others uncompiled. A resumed run meets them
in another order, so here the shapes that are compiled are state: the first `MOST` of the run.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

MOST = 8  # shapes; as many as torch compiles by itself
_AGAIN = 64  # compilations of shapes that were compiled before


class Compiled:
    """`module` is the compiled `model`; `shapes` are digests of the shapes that it is compiled for, in their order."""

    def __init__(self, model: nn.Module, on_event: Callable[..., None]) -> None:
        self.shapes: list[str] = []
        self.module = cast(nn.Module, torch.compile(model, dynamic=False))
        self._model, self._on_event = model, on_event
        self._compiled: Callable[..., Any] = self.module.forward
        self.module.forward = self._forward
        self._met: set[str] = set()  # by this process
        self._again, self._told = 0, False

    def load(self, shapes: list[str]) -> None:
        self.shapes = list(shapes)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        shape = _shape(args, kwargs, self._model.training)
        if self._again >= _AGAIN or not self._admits(shape):
            return self._model(*args, **kwargs)
        before = _graphs()
        output = self._compiled(*args, **kwargs)
        if shape in self._met and _graphs() > before:
            self._count_again()
        self._met.add(shape)
        return output

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

    It counts what earlier trials of the process have compiled too, and computes without a word uncompiled from then on.
    """
    from torch._dynamo import config

    return config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> str:
    leaves, spec = tree_flatten((args, kwargs))
    parts = [str(spec), training, torch.is_grad_enabled(), *map(_part, leaves)]
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _part(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), str(leaf.dtype), leaf.device.type, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__qualname__


def _graphs() -> int:
    """Returns how many graphs this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
