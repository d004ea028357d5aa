"""Calls torch's optimizers without the wrappers that torch adds for its profiler and its compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_COMPILER = "torch._dynamo"
_INSTEAD = "__dynamo_disable"  # where torch keeps what it calls in place of a method that must not be compiled


def unmarked(of: Optimizer) -> Callable[[], Any]:
    """Returns `of.step` without the profiler's mark, which takes a fifth of a small model's step, unless one is on.

    torch wraps the `step` of every optimizer class for the mark and for hooks (`Optimizer.profile_hook_step`). With
    hooks, or without that wrapper, `step` is called as it is. Below it, torch's optimizers have a second wrapper
    (`_use_grad_for_differentiable`), which switches gradients off and imports torch._dynamo to mark compiled code: the
    former is done here, the latter left out.
    """
    step: Any = type(of).step
    before = of._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
    hooks = before or of._optimizer_step_post_hooks or _global_optimizer_post_hooks
    if hooks or not getattr(step, "hooked", False):
        return of.step
    bare, marked = _without_compiler(step.__wrapped__, of), of.step
    return lambda: (marked if profiler._is_profiler_enabled else bare)()


def _without_compiler(step: Any, of: Optimizer) -> Callable[[], Any]:
    if step.__code__.co_name != "_use_grad":
        return partial(step, of)
    method, gradients = step.__wrapped__, of.defaults["differentiable"]

    def bare() -> Any:
        with torch.set_grad_enabled(gradients):
            return method(of)

    return bare


def without_compiler() -> None:
    """Makes torch's optimizers work without torch._dynamo until something else imports it.

    torch imports it with the first optimizer, for 0.5 s of a processor and 28 MB, since a few methods of Optimizer are
    called through a wrapper that keeps compiled code from tracing them (`torch._disable_dynamo`). While nothing can
    have been compiled, the bare method does the same.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _INSTEAD):
            setattr(method, _INSTEAD, partial(_called, method))


def _called(method: Any, *args: Any, **kwargs: Any) -> Any:
    if _COMPILER not in sys.modules:
        return method(*args, **kwargs)
    delattr(method, _INSTEAD)  # torch makes its own
    return getattr(Optimizer, method.__name__)(*args, **kwargs)
