"""Augmentations: functions of (sample, generator), to be called in `Task.augment`.

Each changes the tensor `on` of a sample: a key of a dict, an index of a tuple, or None if the sample is the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

Place = str | int | None


def _changed(sample: Any, on: Place, change: Callable[[Tensor], Any]) -> Any:
    if on is None:
        return change(sample)
    if isinstance(sample, dict):
        return sample | {on: change(sample[on])}
    assert isinstance(on, int)
    values = list(sample)
    values[on] = change(values[on])
    return type(sample)(*values) if hasattr(sample, "_fields") else type(sample)(values)


@dataclass(frozen=True)
class Noise:
    """Adds normal noise of standard deviation `std`."""

    std: float
    on: Place = None

    def __call__(self, sample: Any, generator: Generator) -> Any:
        return _changed(sample, self.on, lambda x: x + self.std * torch.randn(x.shape, generator=generator).to(x.dtype))


@dataclass(frozen=True)
class Mask:
    """Sets each entry to `value` with probability `share`; with `dim`, whole slices along it."""

    share: float
    value: float = 0.0
    dim: int | None = None
    on: Place = None

    def __call__(self, sample: Any, generator: Generator) -> Any:
        def change(x: Tensor) -> Tensor:
            shape = x.shape if self.dim is None else [n if d == self.dim % x.ndim else 1 for d, n in enumerate(x.shape)]
            return x.masked_fill(torch.rand(shape, generator=generator) < self.share, self.value)

        return _changed(sample, self.on, change)


@dataclass(frozen=True)
class Permute:
    """Shuffles the slices along `dim`."""

    dim: int = 0
    on: Place = None

    def __call__(self, sample: Any, generator: Generator) -> Any:
        def change(x: Tensor) -> Tensor:
            return x.index_select(self.dim, torch.randperm(x.shape[self.dim], generator=generator))

        return _changed(sample, self.on, change)


@dataclass(frozen=True)
class MaskTokens:
    """BERT's masking (Devlin et al. 2019): tokens [length] -> {"tokens", "labels"}, labels -100 where not predicted.

    `share` of the tokens are to be predicted; 80 % of these become `mask_id`, 10 % any token, 10 % stay.
    """

    mask_id: int
    vocab_size: int
    share: float = 0.15

    def __call__(self, sample: Tensor, generator: Generator) -> dict[str, Tensor]:
        predicted = torch.rand(sample.shape, generator=generator) < self.share
        kind = torch.rand(sample.shape, generator=generator)
        other = torch.randint(self.vocab_size, sample.shape, generator=generator, dtype=sample.dtype)
        tokens = torch.where(predicted & (kind < 0.8), self.mask_id, sample)
        tokens = torch.where(predicted & (kind >= 0.8) & (kind < 0.9), other, tokens)
        return {"tokens": tokens, "labels": torch.where(predicted, sample, -100)}


@dataclass(frozen=True)
class Chain:
    """Applies one augmentation after another."""

    steps: tuple[Callable[[Any, Generator], Any], ...]

    def __call__(self, sample: Any, generator: Generator) -> Any:
        for step in self.steps:
            sample = step(sample, generator)
        return sample
