"""Finds the batch size at which larger ones stop paying, and the largest that fits into memory.

It measures the simple noise scale of the gradient, B = tr(Sigma)/|G|^2 (McCandlish et al. 2018, arXiv 1812.06162, eq.
2.9 and appendix A.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, count

from trainer.compat.fake import DataDependentOutputException
from trainer.config import TrainConfig
from trainer.diagnose.trial import fresh
from trainer.errors import ConfigError
from trainer.memory.bound import memory_limit
from trainer.memory.estimate import estimate
from trainer.model.precision import resolved
from trainer.task import Task

BLOCKS = 5  # readings of the noise scale: each the ratio of two means over a fifth of the steps
PARTS = 4  # micro-batches of a window, whose gradients are compared


@dataclass(frozen=True)
class BatchSizes:
    """The measured noise scales and memory needs, and the batch size that they suggest.

    `noise`: (steps done, noise scale in samples), NaN where the gradient is lost in noise. `memory`: (batch size, bytes
    of a step that takes it in one pass), empty if the loss looks at values. `suggestion` is the power of two nearest to
    the last noise scale, within the training set, and `micro_batch` the part of it that fits into memory at once, if
    that is less.
    """

    noise: list[tuple[int, float]]
    memory: list[tuple[int, int]]
    suggestion: int | None
    micro_batch: int | None


def find_batch_size(task: Task, config: TrainConfig, steps: int = 100) -> BatchSizes:
    """Trains `steps` windows of `task` under `config`, and measures the noise scale meanwhile.

    Raises ConfigError if a window is too small to be compared with its parts.
    """
    if config.batch_size < 2:
        raise ConfigError(
            "train.batch_size is 1: the gradients of a window's parts are compared, so give it 2 or more."
        )
    parts = {"gradients": config.gradients.model_copy(update={"noise_scale": True})}
    parts |= {"micro_batch_size": max(1, config.batch_size // PARTS)}
    noise: list[tuple[int, float]] = []
    with fresh(task, config.model_copy(update=parts)) as fit:
        meter, per_block = fit.state.meter, max(1, steps // BLOCKS)
        windows = chain.from_iterable(fit.loader.epoch(epoch, 0) for epoch in count())
        fit.state.model.train()
        for step in range(1, steps + 1):
            fit.stepper.take(next(windows), fit.lr_at(min(fit.state.step, fit.total - 1)))
            fit.state.step += 1
            if step % per_block == 0:
                fit.stepper.drain()
                noise.append((step, meter.metrics().get("train/noise_scale", math.nan)))
                meter.new_epoch()
        limit, largest = memory_limit(config, fit.device), fit.loader.sampler.size
        scale = next((scale for _, scale in reversed(noise) if math.isfinite(scale)), None)
        suggestion = None if scale is None else min(_power_of_two(scale), _power_of_two(largest, at_most=True))
        sizes = [1 << i for i in range(_power_of_two(largest, at_most=True).bit_length())]
        least, most = fit.loader.sampler.least, 4 * max(suggestion or 0, config.batch_size)
        shown = [size for size in sizes if least <= size <= most][-8:]
        resolved_config = resolved(config, fit.device)
        try:
            memory = [(size, estimate(task, resolved_config, fit.loader.first(size)).peak) for size in shown]
        except DataDependentOutputException:
            memory = []
    micro = None
    if suggestion is not None and limit is not None and memory:
        fitting = [size for size, peak in memory if size <= suggestion and peak <= limit]
        micro = max(fitting, default=1) if max(fitting, default=0) < suggestion else None
    return BatchSizes(noise, memory, suggestion, micro)


def _power_of_two(value: float, *, at_most: bool = False) -> int:
    exponent = math.log2(max(value, 1))
    return 2 ** (math.floor(exponent) if at_most else round(exponent))
