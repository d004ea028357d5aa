"""Lion: the sign of an interpolated momentum."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer.compat import foreach
from trainer.optim.base import Own, decay


class Lion(Own):
    """Chen et al. 2023, arXiv 2302.06675, program 1, with decoupled decay:

    u = sign(beta1 m + (1 - beta1) g),  p <- p - lr (u + wd p),  m <- beta2 m + (1 - beta2) g.
    """

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m = self.buffers("exp_avg", params)
        signs = foreach.lerp(m, grads, 1 - beta1)
        foreach.sign_(signs)
        decay(params, group)
        foreach.add_(params, signs, alpha=-group["lr"])
        foreach.lerp_(m, grads, 1 - beta2)
