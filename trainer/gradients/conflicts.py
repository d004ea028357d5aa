"""Projects the gradients of a loss's terms off each other where they conflict: `train.gradients.conflicts`.

PCGrad (Yu et al. 2020, arXiv 2001.06782, algorithm 1): for each term i and, in random order, each other one j,

    g_i <- g_i - (g_i . g_j) / |g_j|^2 g_j  where g_i . g_j < 0, with the g_j of before,

and the step is on sum_i g_i. The gradients are those of the whole window, so micro-batches of any size give the same.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.errors import ConfigError, TrainerError
from trainer.gradients.accumulate import accumulate
from trainer.ranks import NO_GRADIENT, Solo
from trainer.runtime.window import Window
from trainer.task import Loss

Order = Callable[[int], Sequence[int]]  # the number of terms -> a random order of them


class TermByTerm(Solo):
    """The passes of one process, whose gradients of single terms are kept apart, by the terms' names."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.gradients: dict[str, list[Tensor | None]] = {}

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        for i, batch in enumerate(batches):
            loss = loss_of(i, batch)
            if not loss.parts:
                raise ConfigError(
                    "train.gradients.conflicts=pcgrad takes the gradient of each term of the loss, and Task.loss "
                    "returned a Loss without parts: let it return what trainer.losses.weighted_sum or uncertainty_sum "
                    "does, or leave train.gradients.conflicts out."
                )
            parts = {name: part for name, part in loss.parts.items() if part.requires_grad}
            if not parts and float(loss.count) > 0:
                raise TrainerError(NO_GRADIENT)
            for left, (name, part) in zip(reversed(range(len(parts))), parts.items(), strict=True):
                self._add(name, torch.autograd.grad(part, self.params, retain_graph=left > 0, allow_unused=True))
            yield loss

    def _add(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        before = self.gradients.setdefault(name, [None] * len(self.params))
        pairs = zip(before, gradients, strict=True)
        self.gradients[name] = [a if b is None else b if a is None else a + b for a, b in pairs]


def without_conflicts(
    batches: Sequence[Any], loss_of: Callable[[int, Any], Loss], params: Sequence[nn.Parameter], order: Order
) -> Window:
    """Returns the window of `accumulate`, and leaves in `params` the sum of the projected gradients of its terms.

    The term `gradient_conflicts` is the share of projections that have changed something.
    """
    terms = TermByTerm(params)
    window = accumulate(batches, loss_of, None, terms)
    gradients, conflicts = projected(list(terms.gradients.values()), order)
    for p, grad in zip(params, gradients, strict=True):
        p.grad = grad
    window.terms["gradient_conflicts"] = conflicts * window.count
    return window


@torch.no_grad()
def projected(gradients: Sequence[Sequence[Tensor | None]], order: Order) -> tuple[list[Tensor | None], Tensor]:
    """Returns the sum of the terms' projected gradients, by parameter, and the share of conflicts among all pairs.

    A parameter that no term depends on has no gradient; for a term that does not depend on it, it counts as zeros.
    """
    count = len(gradients[0]) if gradients else 0
    used = [i for i in range(count) if any(term[i] is not None for term in gradients)]
    terms = [[_of(term[i], [other[i] for other in gradients]) for i in used] for term in gradients]
    squares = [_dot(term, term) for term in terms]
    moved = [[g.clone() for g in term] for term in terms]
    conflicts: list[Tensor] = []
    for i, mine in enumerate(moved):
        for j in order(len(terms)):
            if i != j:
                product = _dot(mine, terms[j]).clamp(max=0.0)
                conflicts.append((product < 0).double())
                share = torch.where(squares[j] > 0, product / squares[j], 0.0)
                foreach.sub_(mine, foreach.mul(terms[j], share))
    total: list[Tensor | None] = [None] * count
    for k, i in enumerate(used):
        total[i] = torch.stack([term[k] for term in moved]).sum(0)
    return total, torch.stack(conflicts).mean() if conflicts else torch.zeros(())


def _of(gradient: Tensor | None, others: Sequence[Tensor | None]) -> Tensor:
    like = next(other for other in others if other is not None)
    return torch.zeros_like(like) if gradient is None else gradient


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([product.sum(dtype=torch.float64) for product in foreach.mul([*left], [*right])]).sum()
