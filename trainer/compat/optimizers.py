"""Names the hooks and marks that torch keeps around an optimizer's step."""

from __future__ import annotations

from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer

from trainer.compat.private import private

_BEFORE = private("torch.optim.optimizer:_global_optimizer_pre_hooks", seen="2.13")
_AFTER = private("torch.optim.optimizer:_global_optimizer_post_hooks", seen="2.13")


def has_hooks(optimizer: Optimizer) -> bool:
    """Returns True if a hook runs before or after a step of this optimizer (torch 2.13)."""
    return any((optimizer._optimizer_step_pre_hooks, _BEFORE, optimizer._optimizer_step_post_hooks, _AFTER))


def is_profiled() -> bool:
    """Returns True if torch's profiler is on (torch 2.13)."""
    return profiler._is_profiler_enabled


def skips_by_flag(optimizer: Any) -> bool:
    """Returns True if an optimizer obeys the flag `found_inf` on the device (torch 2.13)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)
