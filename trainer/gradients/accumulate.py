"""Accumulates the gradients of a window's micro-batches into the one that the optimizer steps on."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.config import ClipConfig
from trainer.ranks import ALONE, Solo
from trainer.runtime.window import Window
from trainer.task import Loss

TINY = 1e-6  # added to norms in denominators


def accumulate(
    batches: Sequence[Any],
    loss_of: Callable[[int, Any], Loss],
    probe: NoiseProbe | None = None,
    ranks: Solo = ALONE,
) -> Window:
    """Adds up the gradients of the *summed* loss of each micro-batch; nothing is divided yet.

    With L_i the sum and n_i the count of micro-batch i, the large batch's gradient is (sum_i dL_i) / (sum_i n_i), and
    not the mean of the means dL_i / n_i, which over-weights small micro-batches.
    """
    window = Window(0.0, 0.0, {})
    if probe is not None:
        probe.clear()  # drops the sums of passes that ran out of memory
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
    """Measures the noise of the gradient from a window's micro-batches (McCandlish et al. 2018, arXiv 1812.06162).

    With n_i samples in micro-batch i, N in all and mean gradients g_i and g, E|g_i|^2 = |G|^2 + tr(Sigma)/n_i and
    E|g|^2 = |G|^2 + tr(Sigma)/N. The mean over i of the first and the second give their eqs. A.2 and A.3, where
    1/B_small is the mean of 1/n_i. Both are unbiased, so their means over steps are divided.
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
        """Takes over the gradients of a micro-batch, and clears them: `finish` puts their sum back."""
        grads = [p.grad for p in self.params if p.grad is not None]
        self._squares.append(nn.utils.get_total_norm(grads).square())
        self._counts.append(torch.as_tensor(count, dtype=self._squares[-1].dtype, device=self._squares[-1].device))
        for i, p in enumerate(self.params):
            if p.grad is not None:
                # A copy: a CUDA graph writes the next micro-batch's gradient to the same memory.
                self._sums[i] = p.grad.clone() if (before := self._sums[i]) is None else before.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns (|G|^2, tr(Sigma)) of the window; NaN if fewer than two of its micro-batches have samples."""
        for p, total in zip(self.params, self._sums, strict=True):
            p.grad = total
        squares, n = torch.stack(self._squares), torch.stack(self._counts)
        square = nn.utils.get_total_norm([g for g in self._sums if g is not None]).square()
        self.clear()
        filled, total = n > 0, n.sum()
        inverse = torch.where(filled, 1 / n, 0.0).sum() / filled.sum()
        small = torch.where(filled, squares / n.square(), 0.0).sum() / filled.sum()
        large = square / total.square()
        trace = torch.where(filled.sum() > 1, (small - large) / (inverse - 1 / total), torch.nan)
        return large - trace / total, trace


@torch.no_grad()
def divide_and_clip(
    params: Sequence[nn.Parameter], count: float | Tensor, clip: ClipConfig, ranks: Solo = ALONE
) -> float:
    """Divides the accumulated gradients by `count` and clips them, by norm and then by value.

    Returns the norm after the division. Division and clipping by norm are one multiplication by min(1, clip / |g|) /
    count, where |g| = |sum| / count (Pascanu et al. 2013, arXiv 1211.5063). A count of 0 gives a norm that is not
    finite.
    """
    grads = [p.grad for p in params if p.grad is not None]
    count = float(count) or math.nan
    norm = ranks.norm(grads).item() / count
    scale = 1.0 if clip.norm is None else clip.norm / (norm + TINY)
    if grads:
        grads = ranks.local(grads)
        foreach.mul_(grads, min(scale, 1.0) / count)
    if grads and clip.value is not None:
        clip_value_(grads, clip.value)
    return norm


@torch.no_grad()
def divide_and_clip_unread(
    params: Sequence[nn.Parameter], count: float | Tensor, clip: ClipConfig, ranks: Solo = ALONE
) -> tuple[Tensor, float]:
    """Divides and clips like `divide_and_clip`, without waiting for the device; the host computes the rest.

    Returns the norm and the number by which it must still be divided once it is read. min(1, clip / (|sum| / count +
    e)) / count = 1 / max(count, (|sum| + e count) / clip), which takes two launches besides the norm and the division
    of the gradients, if clip is 1.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = ranks.norm(grads)
    count = count if isinstance(count, Tensor) else float(count) or math.nan
    divisor = count if clip.norm is None else _divisor(norm, count, clip.norm)
    if grads:
        grads = ranks.local(grads)
        foreach.div_(grads, divisor.to(grads[0].dtype) if isinstance(divisor, Tensor) else divisor)
    if grads and clip.value is not None:
        clip_value_(grads, clip.value)
    return (norm / count, 1.0) if isinstance(count, Tensor) or math.isnan(count) else (norm, count)


def _divisor(norm: Tensor, count: float | Tensor, limit: float) -> Tensor:
    above = torch.add(norm, count, alpha=TINY) if isinstance(count, Tensor) else norm + TINY * count
    above = above if limit == 1.0 else above / limit
    return torch.maximum(above, count) if isinstance(count, Tensor) else above.clamp(min=count)


def clip_value_(grads: list[Tensor], limit: float) -> None:
    """Bounds every element by `limit`; for a complex one, the real and the imaginary part."""
    grads = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    foreach.clamp_min_(grads, -limit)
    foreach.clamp_max_(grads, limit)
