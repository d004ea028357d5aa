"""Holds Shampoo and SOAP: preconditioners that are products of one matrix for each side of a weight matrix.

Weights of more than two dimensions count as matrices [first, all others]; a side longer than `max_dim` has no
preconditioner, and vectors have a diagonal one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.optim.base import Own, decay

SIDES = ("left", "right")


class _Kronecker(Own):
    def __init__(self, groups: list[dict[str, Any]], **hyperparameters: Any) -> None:
        super().__init__(groups, foreach=False, **hyperparameters)

    def gram(self, p: Tensor, g: Tensor, max_dim: int) -> dict[str, Tensor]:
        """Returns G G^T for the left side and G^T G for the right one, without sides longer than `max_dim`."""
        if p.ndim < 2:
            return {}
        products = {"left": (g.shape[0], lambda: g @ g.T), "right": (g.shape[1], lambda: g.T @ g)}
        return {side: product() for side, (size, product) in products.items() if size <= max_dim}

    def transform(self, g: Tensor, matrices: dict[str, Tensor]) -> Tensor:
        """Returns left^T G right, without the sides that are missing."""
        g = matrices["left"].T @ g if "left" in matrices else g
        return g @ matrices["right"] if "right" in matrices else g


def _matrix(t: Tensor) -> Tensor:
    return t if t.ndim < 2 else t.reshape(t.shape[0], -1)


class Shampoo(_Kronecker):
    """Gupta et al. 2018, arXiv 1802.09568, algorithm 1, with momentum and decoupled decay:

    L <- L + G G^T, R <- R + G^T G from eps I,  v <- mu v + L^(-1/4) G R^(-1/4),  W <- (1 - lr wd) W - lr v.

    With one side alone the power is -1/2, and a vector is divided by the root of its summed squares (AdaGrad). The
    roots are computed anew at the first and then at every `update_every`-th step.
    """

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        [p], g, [v] = params, _matrix(grads[0]), self.buffers("momentum_buffer", params)
        state, [step] = self.state[p], self.count(params)
        grams = self.gram(p, g, group["max_dim"])
        for side, gram in grams.items():
            if f"{side}_sum" not in state:
                state[f"{side}_sum"] = group["eps"] * torch.eye(len(gram), dtype=p.dtype, device=p.device)
            state[f"{side}_sum"].add_(gram)
            if step == 1 or step % group["update_every"] == 0:
                state[f"{side}_root"] = _power(state[f"{side}_sum"], -0.5 / len(grams), group["eps"])
        if grams:
            g = self.transform(g, {side: state[f"{side}_root"] for side in grams})
        else:
            [squares] = self.buffers("sum_sq", params)
            g = g / (_matrix(squares.addcmul_(grads[0], grads[0])).sqrt() + group["eps"])
        v.mul_(group["momentum"]).add_(g.reshape(p.shape))
        decay(params, group)
        p.add_(v, alpha=-group["lr"])


def _power(matrix: Tensor, exponent: float, floor: float) -> Tensor:
    """Returns a power of a symmetric matrix with eigenvalues of at least `floor`; contiguous, as after a checkpoint."""
    values, vectors = torch.linalg.eigh(matrix)
    return ((vectors * values.clamp(min=floor) ** exponent) @ vectors.T).contiguous()


class Soap(_Kronecker):
    """Vyas et al. 2025, arXiv 2409.11321, algorithm 3: Adam in the eigenbasis of Shampoo's preconditioner.

    L and R are running means (beta2) of G G^T and G^T G; their eigenbases follow every `update_every` steps by one
    power iteration and a QR decomposition (algorithm 4). A matrix's first gradient only sets the bases up, as in the
    authors' code: in the basis of a gradient itself Adam would divide rounding errors by rounding errors.
    """

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        [p], g, state = params, _matrix(grads[0]), self.state[params[0]]
        grams = self.gram(p, g, group["max_dim"])
        if grams and "left_basis" not in state and "right_basis" not in state:
            for side, gram in grams.items():
                state[f"{side}_mean"] = gram * (1 - group["betas"][1])
                state[f"{side}_basis"] = torch.linalg.eigh(gram)[1].flip(1).contiguous()  # the largest first
            return
        [step], (beta1, beta2) = self.count(params), group["betas"]
        bases = {side: state[f"{side}_basis"] for side in grams}
        m, v = (_matrix(self.buffers(name, params)[0]) for name in ("exp_avg", "exp_avg_sq"))
        m.lerp_(g, 1 - beta1)
        v.lerp_(self.transform(g, bases).square(), 1 - beta2)
        second = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = self.transform(self.transform(m / (1 - beta1**step), bases) / second, _inverse(bases))
        decay(params, group)
        p.add_(update.reshape(p.shape), alpha=-group["lr"])
        for side, gram in grams.items():
            mean = state[f"{side}_mean"].lerp_(gram, 1 - beta2)
            if step % group["update_every"] == 0:
                state[f"{side}_basis"] = torch.linalg.qr(mean @ bases[side])[0].contiguous()


def _inverse(bases: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the matrices with which `transform` undoes a transform by `bases`."""
    return {side: basis.T for side, basis in bases.items()}
