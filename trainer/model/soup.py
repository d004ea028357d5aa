"""Makes model soups: the mean of the weights of several trained models (Wortsman et al. 2022, arXiv 2203.05482)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def same_architecture(a: Weights, b: Weights) -> bool:
    """Returns True if both hold the same names, shapes and types."""
    return a.keys() == b.keys() and all(_kind(a[k]) == _kind(b[k]) for k in a)


def _kind(value: Any) -> Any:
    """Returns a tensor's shape and dtype, or the type of another value, a module's extra state."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def mean(members: Sequence[Weights]) -> dict[str, Tensor]:
    """Returns the mean of each floating-point tensor, summed in float64, and the first member's other values.

    Batch norm's statistics are averaged like weights.
    """
    first = members[0]
    return {
        name: torch.stack([weights[name].double() for weights in members]).mean(dim=0).to(tensor.dtype)
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
        else deepcopy(tensor)
        for name, tensor in first.items()
    }


def greedy(members: Sequence[Weights], score: Callable[[Weights], Sequence[float]]) -> list[int]:
    """Returns the members, best first, that make up the greedy soup (recipe 1 of the paper).

    Each is added if it lowers no score of the mean; larger scores are better, and NaN never is.
    """
    chosen, best = [0], score(members[0])
    for i in range(1, len(members)):
        scores = score(mean([members[k] for k in (*chosen, i)]))
        if all(value >= before for value, before in zip(scores, best, strict=True)):
            chosen.append(i)
            best = scores
    return chosen
