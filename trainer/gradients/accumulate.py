"""Accumulates the gradients of a window's micro-batches into the one that the optimizer steps on."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ClipConfig
from trainer.ranks import ALONE, Solo
from trainer.runtime.window import Window
from trainer.task import Loss


def accumulate(
    batches: Sequence[Any],
    loss_of: Callable[[int, Any], Loss],
    probe: NoiseProbe | None = None,
    ranks: Solo = ALONE,
) -> Window:
    """Add up the gradients of the *summed* loss of each micro-batch; nothing is divided yet.

    With L_i the sum and n_i the count of micro-batch i, the large batch's gradient is (sum_i dL_i) / (sum_i n_i), and
    not the mean of the means dL_i / n_i, which over-weights small micro-batches.
    """
    window = Window(0.0, 0.0, {})
    if probe is not None:
        probe.clear()  # passes that ran out of memory have left theirs
    for i, loss in enumerate(ranks.passes(batches, loss_of)):
        window.loss = loss.sum.detach() if i == 0 else window.loss + loss.sum.detach()
        window.count = loss.count if i == 0 else window.count + loss.count
        for name, term in loss.terms.items():
            window.terms[name] = term.detach() + window.terms[name] if name in window.terms else term.detach()
        if probe is not None:
            probe.take(loss.count)
    if probe is not None:
        window.noise = probe.finish()
    return window


class NoiseProbe:
    """The noise of the gradient, from the micro-batches of a window (McCandlish et al. 2018, arXiv 1812.06162).

    With n_i samples in micro-batch i, N in all and mean gradients g_i and g, E|g_i|^2 = |G|^2 + tr(Sigma)/n_i and
    E|g|^2 = |G|^2 + tr(Sigma)/N. The mean over i of the first and the second give their eqs. A.2 and A.3, where
    1/B_small is the mean of 1/n_i: both unbiased, so it is their means over steps that are divided.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.clear()

    def clear(self) -> None:
        self._sums: list[Tensor | None] = [None] * len(self.params)
        self._squares: list[Tensor] = []
        self._counts: list[Tensor] = []

    @torch.no_grad()
    def take(self, count: float | Tensor) -> None:
        """Take in the gradients of a micro-batch, and clear them: they are put back, added up, at the end."""
        grads = [p.grad for p in self.params if p.grad is not None]
        self._squares.append(nn.utils.get_total_norm(grads).square())
        self._counts.append(torch.as_tensor(count, dtype=self._squares[-1].dtype, device=self._squares[-1].device))
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self._sums[i] = p.grad if (before := self._sums[i]) is None else before.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, Tensor]:
        """(|G|^2, tr(Sigma)) of the window; NaN where fewer than two of its micro-batches hold anything."""
        for p, total in zip(self.params, self._sums, strict=True):
            p.grad = total
        squares, n = torch.stack(self._squares), torch.stack(self._counts)
        of_all = nn.utils.get_total_norm([g for g in self._sums if g is not None]).square()
        self.clear()
        held, total = n > 0, n.sum()
        inverse = torch.where(held, 1 / n, 0.0).sum() / held.sum()
        small = torch.where(held, squares / n.square(), 0.0).sum() / held.sum()
        large = of_all / total.square()
        trace = torch.where(held.sum() > 1, (small - large) / (inverse - 1 / total), torch.nan)
        return large - trace / total, trace


@torch.no_grad()
def divide_and_clip(
    params: Sequence[nn.Parameter], count: float | Tensor, clip: ClipConfig, *, wait: bool, ranks: Solo = ALONE
) -> float | Tensor:
    """Divide the accumulated gradients by `count` and clip them, by norm and then by value; give their norm before.

    Division and clipping by norm are one multiplication by min(1, clip / |g|) / count, where |g| = |sum| / count
    (Pascanu et al. 2013, arXiv 1211.5063). A count of 0 gives a norm that is not finite. With `wait` the norm is read,
    and a float; without, all of it stays on the device.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = ranks.norm(grads)
    if wait:
        norm, count = norm.item(), float(count) or math.nan
    norm = norm / count
    scale = 1.0 if clip.norm is None else clip.norm / (norm + 1e-6)
    if grads:
        grads = ranks.local(grads)
        at_most_one = scale.clamp(max=1.0) if isinstance(scale, Tensor) else min(scale, 1.0)
        torch._foreach_mul_(grads, at_most_one / count)
    if grads and clip.value is not None:
        clip_value_(grads, clip.value)
    return norm


def clip_value_(grads: list[Tensor], limit: float) -> None:
    """Bound every element by `limit`, of a complex one the real and the imaginary part."""
    grads = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    torch._foreach_clamp_min_(grads, -limit)
    torch._foreach_clamp_max_(grads, limit)
