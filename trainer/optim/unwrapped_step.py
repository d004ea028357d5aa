"""Calls torch's optimizers without the wrappers that torch adds for its profiler and its compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.compat.optimizers import has_hooks, is_profiled

_INSTEAD = "__dynamo_disable"  # torch's attribute for the function called instead of an uncompilable method


def unmarked(of: Optimizer) -> Callable[[], Any]:
    """Returns `of.step` without the profiler's mark, which takes a fifth of a small model's step, unless one is on.

    torch wraps the `step` of every optimizer class for the mark and for hooks (`Optimizer.profile_hook_step`). With
    hooks, or without that wrapper, `step` is called as it is. Below it, torch's optimizers have a second wrapper
    (`_use_grad_for_differentiable`), which switches gradients off and imports torch._dynamo to mark compiled code: the
    former is done here, the latter omitted.
    """
    step: Any = type(of).step
    if has_hooks(of) or not getattr(step, "hooked", False):
        return of.step
    bare, marked = _without_compiler(step.__wrapped__, of), of.step
    return lambda: (marked if is_profiled() else bare)()


def _without_compiler(step: Any, of: Optimizer) -> Callable[[], Any]:
    if step.__code__.co_name != "_use_grad":
        return partial(step, of)
    method, gradients = step.__wrapped__, of.defaults["differentiable"]

    def bare() -> Any:
        with torch.set_grad_enabled(gradients):
            return method(of)

    return bare


@contextmanager
def without_compiler() -> Iterator[None]:
    """Lets the block make an optimizer without importing torch._dynamo.

    torch imports it with the first optimizer, for 0.5 s of a processor and 28 MB, since `add_param_group` is called
    through a wrapper that keeps compiled code from tracing it (`torch._disable_dynamo`). Nothing compiled makes an
    optimizer here, so the bare method does the same.
    """
    method = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if method is None or hasattr(method, _INSTEAD):
        yield
        return
    setattr(method, _INSTEAD, method)
    try:
        yield
    finally:
        delattr(method, _INSTEAD)
