"""SM3: AdaGrad in sublinear memory."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.optim.base import Own, decay, divided_as


class SM3(Own):
    """Anil et al. 2019, arXiv 1901.11150, SM3-II over rows, columns and further dimensions, with decoupled decay:

    nu = min over dimensions i of acc_i + g^2,  acc_i <- max of nu over the other dimensions,
    m <- mu m + (1 - mu) g / sqrt(nu),  p <- (1 - lr wd) p - lr m, where 0/0 is 0.

    Of a parameter of which each rank has a part, all ranks keep the accumulators whole.
    """

    def __init__(self, groups: list[dict[str, Any]], **hyperparameters: Any) -> None:
        super().__init__(groups, foreach=False, **hyperparameters)

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        [p], [grad], [m] = params, grads, self.buffers("momentum_buffer", params)
        g = grad.reshape(-1, 1) if grad.ndim < 2 else grad
        nu = g.square()
        if (least := self._least(p, g.ndim)) is not None:
            nu += divided_as(least, g)
        whole = _whole(nu)
        for i in range(g.ndim):
            others = [k for k in range(g.ndim) if k != i]
            self.state[p][f"accumulator_{i}"] = whole.amax(others, keepdim=True)
        step = torch.where(nu > 0, g * nu.rsqrt(), 0.0).reshape(grad.shape)
        m.lerp_(step, 1 - group["momentum"])
        decay(params, group)
        p.add_(m, alpha=-group["lr"])

    def _least(self, p: Tensor, dimensions: int) -> Tensor | None:
        kept = [self.state[p].get(f"accumulator_{i}") for i in range(dimensions)]
        return None if kept[0] is None else reduce(torch.minimum, map(_whole, kept))


def _whole(tensor: Any) -> Tensor:
    """Of the parts that ranks have, whose maximum may not exist, since a part can be empty."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
