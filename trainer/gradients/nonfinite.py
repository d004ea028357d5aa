"""Keeps a window that is not finite, or empty, from changing the model."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.compat.optimizers import skips_by_flag
from trainer.compat.tensors import check_finite_and_scale_

_AT_ONCE = 16  # flags that one launch makes


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Returns True if the optimizer decides on the device, by its flag `found_inf`, whether to step.

    On the CPU, reading the gradient's norm before each step costs nothing. On a GPU it would wait for the device; its
    fused optimizers obey the flag that GradScaler sets, and the numbers can be read in blocks.
    """
    return device.type != "cpu" and skips_by_flag(optimizer)


class Flags:
    """Makes the flags by which a fused optimizer skips a step: 1.0 on the device, or 0.0 if all numbers are finite.

    This takes one launch a step if the numbers are of one type, and another one for every 16 flags.
    """

    def __init__(self, device: torch.device) -> None:
        self._unused: Iterator[Tensor] = iter(())
        self._one = torch.ones((), device=device)

    @torch.no_grad()
    def of(self, norm: float | Tensor, loss: float | Tensor) -> Tensor:
        numbers = [torch.as_tensor(number, device=self._one.device) for number in (norm, loss)]
        if numbers[0].dtype != numbers[1].dtype:
            numbers = [numbers[0] + numbers[1]]
        flag = next(self._unused, None)
        if flag is None:
            self._unused = iter(torch.zeros(_AT_ONCE, device=self._one.device).unbind())
            flag = next(self._unused)
        check_finite_and_scale_(numbers, flag, self._one)  # times 1, which changes nothing
        return flag
