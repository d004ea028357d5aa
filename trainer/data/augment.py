"""Augmentations: functions of (sample, generator), to be called in `Task.augment`.

Each changes the tensor `on` of a sample: a key of a dict, an index of a tuple, or None if the sample is the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from trainer.errors import DataError

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
        return _predicted(sample, predicted, self.mask_id, self.vocab_size, generator)


@dataclass(frozen=True)
class MaskWords:
    """BERT's masking of whole words: tokens [length] -> {"tokens" [length], "places" and "labels" [most]}.

    Words in a random order are to be predicted, each with all of its tokens, while they have no more than `most`, the
    `share` of the tokens, together (the release of May 2019 of Devlin et al.; Cui et al. 2019, arXiv 1906.08101). What
    becomes of a token is drawn for each alone, as by `MaskTokens`. "places" are the places of the tokens to predict,
    and "labels" the tokens; the rest of both is 0 and -100. `begins` [vocab_size] is True for tokens that begin a
    word, `special` [vocab_size] for those between texts, which are never predicted.
    """

    mask_id: int
    vocab_size: int
    begins: Tensor
    special: Tensor
    share: float = 0.15

    def __call__(self, sample: Tensor, generator: Generator) -> dict[str, Tensor]:
        predicted = self._chosen(sample, generator)
        masked = _predicted(sample, predicted, self.mask_id, self.vocab_size, generator)
        places = predicted.nonzero().squeeze(1)
        rest = self.most(len(sample)) - len(places)
        labels = F.pad(sample[places], (0, rest), value=-100)
        return {"tokens": masked["tokens"], "places": F.pad(places, (0, rest)), "labels": labels}

    def most(self, length: int) -> int:
        """Returns how many of `length` tokens are predicted at most."""
        return max(round(length * self.share), 1)

    def _chosen(self, sample: Tensor, generator: Generator) -> Tensor:
        """Returns [length], True for the tokens of the words that are to be predicted."""
        special = self.special[sample]
        begins = self.begins[sample] | special
        begins[1:] |= special[:-1]
        begins[0] = True
        words = begins.cumsum(0) - 1  # the number of each token's word
        sizes = torch.bincount(words, ~special)
        chosen, room = torch.zeros(len(sizes), dtype=torch.bool), self.most(len(sample))
        order = torch.randperm(len(sizes), generator=generator)
        for word, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
            if 0 < size <= room:
                chosen[word], room = True, room - size
        return chosen[words]


def _predicted(
    sample: Tensor, predicted: Tensor, mask_id: int, vocab_size: int, generator: Generator
) -> dict[str, Tensor]:
    kind = torch.rand(sample.shape, generator=generator)
    other = torch.randint(vocab_size, sample.shape, generator=generator, dtype=sample.dtype)
    tokens = torch.where(predicted & (kind < 0.8), mask_id, sample)
    tokens = torch.where(predicted & (kind >= 0.8) & (kind < 0.9), other, tokens)
    return {"tokens": tokens, "labels": torch.where(predicted, sample, -100)}


@dataclass(frozen=True)
class CorruptSpans:
    """T5's span corruption (Raffel et al. 2020, arXiv 1910.10683, 3.3.4): tokens [length] -> {"tokens", "labels"}.

    `share` of the tokens are taken out, in spans of `mean` tokens on average, which are drawn among all such divisions.
    "tokens" has a sentinel for each span, "labels" each span after its sentinel, and both have `end` last. Their
    lengths depend on the sample's alone. `sentinels` are ids, one for each of up to `spans(length)` spans.
    """

    sentinels: Tensor
    end: int
    share: float = 0.15
    mean: float = 3.0

    def taken(self, length: int) -> int:
        """Returns how many of `length` tokens are taken out."""
        return max(min(max(round(length * self.share), 1), length - 1), 0)

    def spans(self, length: int) -> int:
        """Returns in how many spans they are."""
        taken = self.taken(length)
        return min(max(round(taken / self.mean), 1), taken, length - taken)

    def __call__(self, sample: Tensor, generator: Generator) -> dict[str, Tensor]:
        taken, spans = self.taken(len(sample)), self.spans(len(sample))
        if not 0 < spans <= len(self.sentinels):
            raise DataError(
                f"CorruptSpans: {len(sample)} tokens of a sample have {spans} spans, and there are "
                f"{len(self.sentinels)} sentinels: give samples of two tokens or more, and a sentinel for each span."
            )
        lengths = [_parts(count, spans, generator) for count in (len(sample) - taken, taken)]
        pieces = sample.split(torch.stack(lengths, dim=1).flatten().tolist())
        marks, end = self.sentinels[:spans].split(1), torch.tensor([self.end])
        tokens = [part for kept, mark in zip(pieces[::2], marks, strict=True) for part in (kept, mark)]
        labels = [part for mark, span in zip(marks, pieces[1::2], strict=True) for part in (mark, span)]
        return {"tokens": torch.cat([*tokens, end]), "labels": torch.cat([*labels, end])}


def _parts(count: int, parts: int, generator: Generator) -> Tensor:
    """Returns positive sizes [parts] that add up to `count`, drawn evenly among all such."""
    cuts = torch.randperm(count - 1, generator=generator)[: parts - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([count]))


@dataclass(frozen=True)
class Chain:
    """Applies one augmentation after another."""

    steps: tuple[Callable[[Any, Generator], Any], ...]

    def __call__(self, sample: Any, generator: Generator) -> Any:
        for step in self.steps:
            sample = step(sample, generator)
        return sample
