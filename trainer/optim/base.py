"""Holds the base of this package's own optimizers."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.compat import foreach
from trainer.runtime.tensors import divided


class Own(Optimizer):
    """An optimizer whose `update` takes lists of tensors: a whole group's at once, or with `foreach=False` one by one.

    It keeps everything in `state`, as tensors by parameter and name, so that a checkpoint holds all of it.
    """

    def __init__(self, groups: list[dict[str, Any]], *, foreach: bool = True, **hyperparameters: Any) -> None:
        super().__init__(groups, {"foreach": foreach, **hyperparameters})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        for params, grads, group in self.batches():
            self.update(params, grads, group)

    def batches(self) -> Iterator[tuple[list[Tensor], list[Any], dict[str, Any]]]:
        """Yields the parameters that have a gradient, in lists for `update`, with their gradients and their group."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for batch in [params] if group["foreach"] else [[p] for p in params]:
                if batch:
                    yield batch, [p.grad for p in batch], group

    def update(self, params: list[Tensor], grads: list[Any], group: dict[str, Any]) -> None:
        """Changes `params` in place and only reads `grads`."""
        raise NotImplementedError

    def buffers(self, name: str, params: list[Tensor]) -> list[Tensor]:
        """Returns the state `name` of each parameter, which begins as zeros of the parameter's shape."""
        for p in params:
            if name not in self.state[p]:  # contiguous, as after a checkpoint: sums then add up in one order
                self.state[p][name] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        return [self.state[p][name] for p in params]

    def count(self, params: list[Tensor]) -> list[int]:
        """Counts this update and returns its number for each parameter, from 1."""
        for p in params:
            self.state[p].setdefault("step", torch.zeros(()))
        steps = [self.state[p]["step"] for p in params]
        foreach.add_(steps, 1)
        return [int(step) for step in steps]


def decay(params: list[Tensor], group: dict[str, Any]) -> None:
    """Applies decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101): p <- (1 - lr wd) p."""
    if group["weight_decay"]:
        foreach.mul_(params, 1 - group["lr"] * group["weight_decay"])


def divided_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns `tensor`, which has the shape of `like`, divided over the ranks as `like` is.

    It may be whole on every rank, or divided in another way.
    """
    if not divided(like):
        return tensor
    if not divided(tensor):
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * like.device_mesh.ndim
        tensor = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    return tensor.redistribute(placements=like.placements)
