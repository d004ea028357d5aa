"""Uses torch's optimizers without what torch puts around them for its profiler and its compiler."""

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
    """`of.step` without the profiler's mark, which takes a fifth of a small model's step, unless a profiler is on.

    torch wraps the `step` of every class of optimizers, for the mark and for hooks (`Optimizer.profile_hook_step`).
    Where there are hooks, or the class is not wrapped so, it is called as it is. Of its own optimizers torch has also
    wrapped what is below, in what switches gradients off and imports torch._dynamo to be told apart in compiled code
    (`_use_grad_for_differentiable`): the first is done here.
    """
    step: Any = type(of).step
    own, of_all = of._optimizer_step_pre_hooks, _global_optimizer_pre_hooks
    hooks = own or of._optimizer_step_post_hooks or of_all or _global_optimizer_post_hooks
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
    """Have torch's optimizers made and used without torch._dynamo until something else imports it: torch does with the
    first one, for 0.5 s of a processor and 28 MB.

    torch calls a few methods of Optimizer by what keeps compiled code from tracing them (`torch._disable_dynamo`).
    Where nothing can have been compiled the method itself does.
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
