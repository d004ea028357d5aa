"""Changes of one image, by a generator that is seeded for it: a resumed run makes the same ones.

Each is called with a sample (x, y), x [3, height, width] uint8, as those of `trainer.data.augment` are.
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
    """A whole number from 0 to `bound` - 1."""
    return int(torch.randint(bound, (), generator=generator))


@dataclass(frozen=True)
class Flip:
    """Half of the images, left to right."""

    def __call__(self, sample: Sample, generator: Generator) -> Sample:
        x, y = sample
        return (x.flip(-1) if _upto(2, generator) else x), y


@dataclass(frozen=True)
class Crop:
    """The image's own size, cut anywhere out of the image with `margin` black pixels around it."""

    margin: int

    def __call__(self, sample: Sample, generator: Generator) -> Sample:
        x, y = sample
        top, left = (_upto(2 * self.margin + 1, generator) for _ in range(2))
        height, width = x.shape[-2:]
        return F.pad(x, (self.margin,) * 4)[:, top : top + height, left : left + width], y


@dataclass(frozen=True)
class Erase:
    """With probability `share` a rectangle of a quarter to a half of each side becomes grey (Zhong et al. 2020,
    arXiv 1708.04896, there with random pixels)."""

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
    """What is done to each image, in this order; mixup is done to batches."""
    steps = [Crop(config.crop)] if config.crop else []
    steps += [Flip()] if config.flip else []
    steps += [Erase(config.erase)] if config.erase else []
    return Chain(tuple(steps))
