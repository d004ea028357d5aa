"""Model soups: the mean of the weights of several trained models (Wortsman et al. 2022, arXiv 2203.05482)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def same_architecture(a: Weights, b: Weights) -> bool:
    """Whether both hold the same names, shapes and types."""
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)


def mean(members: Sequence[Weights]) -> dict[str, Tensor]:
    """The mean of each floating-point tensor, summed in float64; of others, such as counters, the first member's.

    Batch norm's statistics are averaged like weights.
    """
    first = members[0]
    return {
        name: torch.stack([one[name].double() for one in members]).mean(dim=0).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in first.items()
    }


def greedy(members: Sequence[Weights], score: Callable[[Weights], Sequence[float]]) -> list[int]:
    """Which of the members, best first, the greedy soup is made of (recipe 1 of the paper).

    Each is added if the mean with it has no score that is less than without; the larger one, the better, NaN never is.
    """
    chosen, best = [0], score(members[0])
    for i in range(1, len(members)):
        found = score(mean([members[k] for k in (*chosen, i)]))
        if all(value >= before for value, before in zip(found, best, strict=True)):
            chosen.append(i)
            best = found
    return chosen
