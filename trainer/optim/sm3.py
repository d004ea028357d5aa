"""SM3: AdaGrad in sublinear memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainer.optim.base import Own, decay


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
        nu = g.square() + self._least(p, g)
        for i in range(g.ndim):
            others = [k for k in range(g.ndim) if k != i]
            largest = nu.amax(others, keepdim=True)
            self.state[p][f"accumulator_{i}"] = largest.full_tensor() if isinstance(largest, DTensor) else largest
        step = torch.where(nu > 0, g * nu.rsqrt(), 0.0).reshape(grad.shape)
        m.lerp_(step, 1 - group["momentum"])
        decay(params, group)
        p.add_(m, alpha=-group["lr"])

    def _least(self, p: Tensor, g: Tensor) -> Tensor | float:
        least: Tensor | float = 0.0
        for i in range(g.ndim):
            if (accumulator := self.state[p].get(f"accumulator_{i}")) is not None:
                if isinstance(g, DTensor) and not isinstance(accumulator, DTensor):
                    everywhere = [Replicate()] * g.device_mesh.ndim
                    accumulator = DTensor.from_local(accumulator, g.device_mesh, everywhere, run_check=False)
                least = accumulator if i == 0 else torch.minimum(torch.as_tensor(least), accumulator)
        return least
