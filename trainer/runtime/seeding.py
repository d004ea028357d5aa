"""Seeds random numbers statelessly: every random number is a function of (seed, stream, counters).

No generator's state is ever saved. Before any code that may draw, the generators are seeded from the run's seed, the
name of the drawing code, and its position: the epoch, the step and micro-step, or the sample's index. So resuming needs
only the step, and the number of loader workers does not matter.

    attempt    draws of a trial before its own code has seeded anything
    init       model()
    weights/<name>                     one layer's weights, if train.init draws them
    data       train_set()
    shuffle    (epoch)                 the order of the samples
    shards     (epoch)                 the order of shards, and of the rows in a window of them
    bucket     (epoch)                 the order of the buckets' windows
    pack       (epoch)                 the documents' places in the packed rows
    curriculum (epoch)                 the draws among the visible samples
    mixture    (source)                the seed of a source's own order
    fetch      (epoch, first index)    reading one micro-batch of the data set
    augment    (epoch, index)          one sample's augmentation
    step       (step, micro-step)      dropout and other draws of the loss; with several ranks, also by share
    stage, sequence (number, place)    draws of a pipeline's stage, or of dropout on a part of the sequence
    powersgd/<name>                    the first factor of a matrix that PowerSGD sends
    curvature  (step)                  the directions of Sophia's estimate
    evaluate   (step)                  evaluation
    gradient_noise (step)              noise added to the gradient
"""

from __future__ import annotations

import random

import numpy as np
import torch

from trainer.runtime.first_seed import derive


def seed_all(value: int) -> None:
    """Seeds the global generators of torch (CPU and the current CUDA device), numpy and python.

    `torch.manual_seed` walks all backends and takes some 80 us; seeding the generators themselves takes about one.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def shuffled(seed: int, epoch: int, size: int) -> list[int]:
    """Returns the order in which epoch `epoch` visits the `size` samples: a permutation."""
    generator = torch.Generator().manual_seed(derive(seed, "shuffle", epoch))
    return torch.randperm(size, generator=generator).tolist()
