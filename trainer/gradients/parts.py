"""Differentiates a loss part by part, for the rules that compare the parts' gradients."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.errors import ConfigError, TrainerError
from trainer.gradients.accumulate import accumulate
from trainer.gradients.balance import Balance
from trainer.gradients.conflicts import Order, projected
from trainer.ranks import NO_GRADIENT, Solo
from trainer.runtime.window import Window
from trainer.task import Loss


class PartByPart(Solo):
    """The passes of one process, which keep the sums and the gradients of the loss's parts apart, by name."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.gradients: dict[str, list[Tensor | None]] = {}
        self.sums: dict[str, Tensor] = {}

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        for i, batch in enumerate(batches):
            loss = loss_of(i, batch)
            if not loss.parts:
                raise ConfigError(
                    "train.gradients.conflicts and train.gradients.balance compare the gradients of a loss's parts, "
                    "and Task.loss returned a Loss without any: let it return what trainer.losses.weighted_sum does, "
                    "or leave both out."
                )
            parts = {name: part for name, part in loss.parts.items() if part.requires_grad}
            if not parts and float(loss.count) > 0:
                raise TrainerError(NO_GRADIENT)
            for left, (name, part) in zip(reversed(range(len(parts))), parts.items(), strict=True):
                self._add(name, part, torch.autograd.grad(part, self.params, retain_graph=left > 0, allow_unused=True))
            yield loss

    def _add(self, name: str, part: Tensor, gradients: Sequence[Tensor | None]) -> None:
        pairs = zip(self.gradients.setdefault(name, [None] * len(self.params)), gradients, strict=True)
        self.gradients[name] = [a if b is None else b if a is None else a + b for a, b in pairs]
        self.sums[name] = part.detach() + self.sums[name] if name in self.sums else part.detach()


def by_parts(
    batches: Sequence[Any],
    loss_of: Callable[[int, Any], Loss],
    params: Sequence[nn.Parameter],
    *,
    balance: Balance | None = None,
    order: Order | None = None,
) -> Window:
    """Returns the window of `accumulate`, and leaves in `params` the sum of its parts' gradients.

    Each is multiplied by its weight in `balance`, and then, with an `order`, projected off the others it conflicts
    with. The terms are also `balance_<part>`, the weights, and `gradient_conflicts`, the share of pairs in conflict.
    """
    parts = PartByPart(params)
    window = accumulate(batches, loss_of, None, parts)
    if not (gradients := parts.gradients):
        return window
    if balance is not None:
        balance.observe(gradients, parts.sums, window.count)
        gradients = {name: _times(gradient, balance.of(name)) for name, gradient in gradients.items()}
        ones = torch.ones(()) * window.count
        window.terms |= {f"balance_{name}": balance.of(name) * ones for name in gradients}
    if order is not None:
        total, conflicts = projected(list(gradients.values()), order)
        window.terms["gradient_conflicts"] = conflicts * window.count
    else:
        total = [_added(column) for column in zip(*gradients.values(), strict=True)]
    for p, grad in zip(params, total, strict=True):
        p.grad = grad
    return window


@torch.no_grad()
def _times(gradient: Sequence[Tensor | None], weight: float) -> list[Tensor | None]:
    scaled = iter(foreach.mul([g for g in gradient if g is not None], weight))
    return [None if g is None else next(scaled) for g in gradient]


@torch.no_grad()
def _added(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [g for g in gradients if g is not None]
    return torch.stack(present).sum(0) if present else None
