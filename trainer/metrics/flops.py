"""Computes model FLOPs utilisation: the share of a device's arithmetic that the model uses.

Chowdhery et al. 2022, arXiv 2204.02311, appendix B. A step's operations are counted on fake tensors rather than run:
products, convolutions and attention, forward and backward. Operations that activation checkpointing repeats do not
count.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.compat.fake import DataDependentOutputException, FakeTensorMode
from trainer.compat.pytree import tree_map
from trainer.config import TrainConfig
from trainer.data import Loader
from trainer.errors import ConfigError
from trainer.runtime.tensors import OF_LAZY
from trainer.task import Task, built

# Teraflops of dense products by the vendor's data sheets, for devices whose name contains the word; fp16 is as bf16.
PEAKS: dict[str, dict[str, float]] = {
    "A100": {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0},
    "H100 80GB HBM3": {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9},
    "H200": {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9},
}


def full_rate(
    task: Task, config: TrainConfig, tflops: float | Literal["auto"], device: torch.device, loader: Loader
) -> float:
    """Returns the samples per second that devices would reach if they spent all of their `tflops` on the model's
    arithmetic.

    Raises ConfigError if the model's operations or the device's peak are unknown.
    """
    size = min(loader.sampler.micro_batch_size, loader.sampler.size)
    try:
        per_sample = flops(copy.copy(task), loader.first(size)) / size
    except DataDependentOutputException as error:
        raise ConfigError(
            f"the loss looks at values, so its operations cannot be counted: leave train.peak_tflops out ({error})."
        ) from error
    except RuntimeError as error:
        if OF_LAZY not in str(error):
            raise
        raise ConfigError(
            f"{type(task).__name__} has lazy layers, whose operations cannot be counted: give them their sizes, or "
            "leave train.peak_tflops out."
        ) from error
    if per_sample == 0:
        raise ConfigError("the model has no products to count: leave train.peak_tflops out.")
    return (_known(config, device) if tflops == "auto" else tflops) * 1e12 * config.parallel.ranks / per_sample


def flops(task: Task, batch: Any) -> int:
    """Returns the floating point operations of a forward and a backward pass over `batch`; a multiply-add is two."""
    fake, counter = FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)
    with fake, sdpa_kernel(SDPBackend.MATH), counter:
        inputs = tree_map(lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x, batch)
        task.loss(built(task), inputs).sum.backward()
    return counter.get_total_flops()


def _known(config: TrainConfig, device: torch.device) -> float:
    """Returns the teraflops of one device, by its name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    precision = "bf16" if config.precision == "fp16" else config.precision
    for word, peaks in PEAKS.items():
        if word in name and precision in peaks:
            return peaks[precision]
    raise ConfigError(
        f"train.peak_tflops=auto knows no peak of {name} in {config.precision}: give the teraflops of its data sheet, "
        "without sparsity."
    )
