"""Names parts of torch's compiler, which is imported only on use, since that takes seconds."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from trainer.compat.private import private

_peek = private("torch._C._functorch:peek_interpreter_stack", seen="2.13")


def patched_config(**values: Any) -> AbstractContextManager[object]:
    """Returns a context in which the compiler has these options."""
    return private("torch._dynamo.config:patch", seen="2.13")(**values)


def counted(group: str, name: str) -> int:
    """Returns how often the compiler has counted `name`."""
    return private("torch._dynamo.utils:counters", seen="2.13")[group][name]


def compile_errors() -> type[Exception]:
    """Returns the error of which every failure to trace or to compile is a kind."""
    return private("torch._dynamo.exc:TorchDynamoException", seen="2.13")


def has_cpp_compiler() -> bool:
    """Returns True if torch's compiler finds a C++ compiler."""
    try:
        private("torch._inductor.cpp_builder:get_cpp_compiler", seen="2.13")()
    except private("torch._inductor.exc:InvalidCxxCompiler", seen="2.13"):
        return False
    return True


def called_as_it_is(function: Any) -> None:
    """Makes the compiler call a function instead of tracing it (torch 2.13)."""
    function._dynamo_marked_constant = True


def in_transform() -> bool:
    """Returns True within a transform of torch.func."""
    return _peek() is not None
