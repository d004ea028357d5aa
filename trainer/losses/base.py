"""Holds the base of the losses: full precision under autocast, masks, and checks of shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.task import Loss

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `function` compute in at least float32: without autocast, and with half precision arguments widened."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})  # type: ignore[arg-type]

    return wrapped


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def same_shape(**tensors: Tensor) -> None:
    """Raises TrainerError unless all have one shape: broadcasting [n] against [n, 1] would give n x n errors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise TrainerError(f"the loss got {listed}: give them one shape.")


def zeroed(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors with 0 where the mask is false, before any arithmetic: 0 * NaN is NaN, also backwards."""
    return tensors if mask is None else tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def total(elements: Tensor, mask: Tensor | None, **terms: Tensor) -> Loss:
    """Returns the Loss that sums `elements` where `mask` is true; `terms` are summed in the same way."""

    def added(x: Tensor) -> Tensor:
        return x.sum() if mask is None else torch.where(mask, x, 0.0).sum()

    count = elements.numel() if mask is None else mask.sum()
    return Loss(added(elements), count, {name: added(term.detach()) for name, term in terms.items()})
