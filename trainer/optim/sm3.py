"""SM3: AdaGrad in sublinear memory."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.optim.base import Own, decay
from trainer.runtime.tensors import divided


class SM3(Own):
    """Anil et al. 2019, arXiv 1901.11150, SM3-II over rows, columns and further dimensions, with decoupled decay:

    nu = min over dimensions i of acc_i + g^2,  acc_i <- max of nu over the other dimensions,
    m <- mu m + (1 - mu) g / sqrt(nu),  p <- (1 - lr wd) p - lr m, where 0/0 is 0.

    If each rank has a part of a parameter, all ranks keep the accumulators whole, which are as large as its sides
    together; nu itself is never sent.
    """

    def __init__(self, groups: list[dict[str, Any]], **hyperparameters: Any) -> None:
        super().__init__(groups, foreach=False, **hyperparameters)

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        [p], [whole], [m] = params, grads, self.buffers("momentum_buffer", params)
        state, grad, starts = self.state[p], _part(whole), _starts(whole)
        g = grad.reshape(-1, 1) if grad.ndim < 2 else grad
        nu = g.square()
        if "accumulator_0" in state:
            kept = [_whole(state[f"accumulator_{i}"]) for i in range(g.ndim)]
            nu += reduce(torch.minimum, [t.narrow(i, starts[i], g.shape[i]) for i, t in enumerate(kept)])
        for i in range(g.ndim):
            state[f"accumulator_{i}"] = _largest(nu, i, starts[i], whole)
        step = torch.where(nu > 0, g * nu.rsqrt(), 0.0).reshape(grad.shape)
        _part(m).lerp_(step, 1 - group["momentum"])
        decay(params, group)
        p.add_(m, alpha=-group["lr"])


def _largest(nu: Tensor, i: int, start: int, like: Tensor) -> Tensor:
    """Returns the maximum over all dimensions but `i` of the whole tensor of which `nu` is this rank's part.

    The tensor is divided as `like` is. Along `i` the part begins at `start`, and it may be empty.
    """
    others = [k for k in range(nu.ndim) if k != i]
    if not divided(like):
        return nu.amax(others, keepdim=True)
    side = like.shape[i] if i < like.ndim else 1
    largest = nu.new_zeros([side if k == i else 1 for k in range(nu.ndim)])
    if nu.numel():
        largest.narrow(i, start, nu.shape[i]).copy_(nu.amax(others, keepdim=True))
    for dim, placement in enumerate(like.placements):
        if not placement.is_replicate():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=like.device_mesh.get_group(dim))
    return largest


def _starts(tensor: Tensor) -> list[int]:
    """Returns the offsets in `tensor` at which this rank's part begins, by dimension, and two zeros."""
    offset: Sequence[int] = [0] * tensor.ndim
    if divided(tensor):
        from trainer.compat.parallel import shape_and_offset

        _, offset = shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [*offset, 0, 0]


def _part(tensor: Any) -> Tensor:
    return tensor.to_local() if divided(tensor) else tensor


def _whole(tensor: Any) -> Tensor:
    """Returns the whole tensor, since a checkpoint divides state that has its parameter's shape."""
    return tensor.full_tensor() if divided(tensor) else tensor
