"""Finds plain attributes of modules and optimizers that training changes and no checkpoint holds."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.compat.tensors import identity
from trainer.runtime.tensors import left_out

_OF_TORCH = {*vars(nn.Module()), "state", "param_groups", "defaults", "found_inf", "grad_scale"}
_OPAQUE = "opaque"  # another kind of object, or a tensor that is recomputed from the weights
_LONGEST, _DEEPEST = 10_000, 4  # larger or deeper containers are not searched


class Attributes:
    """The attributes that a model, and a user's own optimizer, have when training begins."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._model, self._optimizer, self.told = model, optimizer, False
        self._buffers = {path for _, _, path, _ in left_out(model)}
        self._begun = self._values()

    def tell(self, on_event: Callable[..., None], step: int) -> None:
        """Reports all changed attributes, in one event before a trial's first checkpoint."""
        if self.told:
            return
        self.told = True
        if names := self.changed():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            reason = (
                f"training changes {', '.join(names[:3])}{more}, which no checkpoint holds, so that a resumed trial "
                "begins with what the constructor makes: keep it in a buffer, in what get_extra_state returns, or in "
                "the optimizer's state."
            )
            on_event("unsaved_attributes", step=step, names=names, reason=reason)

    def changed(self) -> list[str]:
        """Returns the names of all changed attributes, and of new buffers, which no checkpoint holds either."""
        pairs = {name: (self._begun.get(name), value) for name, value in self._values().items()}
        names = [name for name, (before, now) in pairs.items() if before != now and _OPAQUE not in (before, now)]
        buffers = (path for _, _, path, buffer in left_out(self._model) if buffer is not None)
        return [*names, *(path for path in buffers if path not in self._buffers)]

    def _values(self) -> dict[str, Hashable]:
        dense = (t for t in (*self._model.parameters(), *self._model.buffers()) if t.layout is torch.strided)
        weights = {identity(t.untyped_storage()) for t in dense}
        return {
            f"{prefix}{name}": _value(attribute, weights)
            for prefix, owner in self._owners()
            for name, attribute in vars(owner).items()
            if name not in _OF_TORCH
        }

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """Yields (prefix of names, object); a module with get_extra_state saves its own attributes."""
        for path, module in self._model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                yield f"{path}." if path else "", module
        if self._optimizer is not None:
            yield f"{type(self._optimizer).__name__}.", self._optimizer


def _value(value: Any, weights: set[int], depth: int = 0) -> Hashable:
    """Returns a digest that stays equal as long as the value does."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return _tensor(value, weights)
    if isinstance(value, np.ndarray):
        return _OPAQUE if value.dtype.hasobject else (value.shape, value.dtype.str, _digest(value.tobytes()))
    if isinstance(value, Optimizer):  # within another one
        value = [dict(state) for state in value.state.values()]
    if isinstance(value, (list, tuple, deque, set, frozenset, dict)) and len(value) <= _LONGEST and depth < _DEEPEST:
        entries = value.items() if isinstance(value, dict) else value
        inner = [_value(entry, weights, depth + 1) for entry in entries]
        return frozenset(inner) if isinstance(value, (set, frozenset)) else tuple(inner)
    return _drawn(value)


def _drawn(value: Any) -> Hashable:
    """Returns the state of a generator of random numbers."""
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return _digest(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state()) if isinstance(value, np.random.RandomState) else _OPAQUE


def _tensor(value: Tensor, weights: set[int]) -> Hashable:
    try:
        if not value.is_leaf or identity(value.untyped_storage()) in weights:
            return _OPAQUE
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # sparse, fake, or transformed
        return _OPAQUE
    return tuple(value.shape), str(value.dtype), _digest(raw)


def _digest(raw: bytes) -> str:
    return blake2b(raw, digest_size=16).hexdigest()
