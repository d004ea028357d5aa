"""Keeps a window that is not finite, or empty, from leaving a trace in the model."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch.optim import Optimizer


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer decides on the device, by its flag `found_inf`, if it takes a step.

    On the CPU, looking at the gradient's norm before each step costs nothing. A GPU would have to be waited for; its
    fused optimizers obey the flag that GradScaler sets, and the numbers can be read in blocks.
    """
    return device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False)
