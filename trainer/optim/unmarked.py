"""Calls an optimizer's step without what torch puts around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd import profiler
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def unmarked(of: Optimizer) -> Callable[[], Any]:
    """`of.step` without the profiler's mark, which takes a fifth of a small model's step, unless a profiler is on.

    torch wraps the `step` of every class of optimizers, for the mark and for hooks (`Optimizer.profile_hook_step`).
    Where there are hooks, or the class is not wrapped so, it is called as it is.
    """
    step: Any = type(of).step
    own, of_all = of._optimizer_step_pre_hooks, _global_optimizer_pre_hooks
    hooks = own or of._optimizer_step_post_hooks or of_all or _global_optimizer_post_hooks
    if hooks or not getattr(step, "hooked", False):
        return of.step
    bare, marked = partial(step.__wrapped__, of), of.step
    return lambda: (marked if profiler._is_profiler_enabled else bare)()
