"""Changes single images, with a generator that is seeded for each: a resumed run makes the same changes.

Each is called with a sample (x, y), x [3, height, width] uint8, like those of `trainer.data.augment`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from studies.convnet.config import AugmentConfig
from trainer.data.augment import Chain

Sample = tuple[Tensor, Tensor]
GREY = 128


def _upto(bound: int, generator: Generator) -> int:
    """Returns a whole number from 0 to `bound` - 1."""
    return int(torch.randint(bound, (), generator=generator))


@dataclass(frozen=True)
class Flip:
    """Flips half of the images, left to right."""

    def __call__(self, sample: Sample, generator: Generator) -> Sample:
        x, y = sample
        return (x.flip(-1) if _upto(2, generator) else x), y


@dataclass(frozen=True)
class Crop:
    """Crops to the image's own size, anywhere within the image with `margin` black pixels around it."""

    margin: int

    def __call__(self, sample: Sample, generator: Generator) -> Sample:
        x, y = sample
        top, left = (_upto(2 * self.margin + 1, generator) for _ in range(2))
        height, width = x.shape[-2:]
        return F.pad(x, (self.margin,) * 4)[:, top : top + height, left : left + width], y


@dataclass(frozen=True)
class Erase:
    """Makes a rectangle of a quarter to a half of each side grey, with probability `share`.

    Zhong et al. 2020, arXiv 1708.04896, use random pixels instead.
    """

    share: float

    def __call__(self, sample: Sample, generator: Generator) -> Sample:
        x, y = sample
        if torch.rand((), generator=generator) >= self.share:
            return sample
        cut = []
        for side in x.shape[-2:]:
            length = side // 4 + _upto(side // 4 + 1, generator)
            start = _upto(side - length + 1, generator)
            cut.append(slice(start, start + length))
        x = x.clone()
        x[:, cut[0], cut[1]] = GREY
        return x, y


def augmentation(config: AugmentConfig) -> Chain:
    """Returns the changes to each image, in this order; mixup changes batches."""
    steps = [Crop(config.crop)] if config.crop else []
    steps += [Flip()] if config.flip else []
    steps += [Erase(config.erase)] if config.erase else []
    return Chain(tuple(steps))
