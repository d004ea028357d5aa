"""Imports a user's own function or class that a configuration names as `package.module:name`."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from trainer.errors import ConfigError


def named(text: str, field: str) -> Any:
    """What `text`, the value of `field`, names. Raises ConfigError where there is nothing of that name; a fault in the
    module's own imports is raised as it is."""
    where, _, name = text.partition(":")
    try:
        module = import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{field}={text!r}: there is no module {where!r}; put it beside the study's file or on PYTHONPATH."
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{field}={text!r}: {module.__file__} has no {name!r}.")
    return getattr(module, name)


def check_call(found: Any, what: str, fix: str, *args: Any, **kwargs: Any) -> None:
    """Raise ConfigError, `what` then `fix`, where `found` does not take these arguments; it is not called. What python
    cannot see the signature of, as of some classes written in C, passes."""
    if not callable(found):
        raise ConfigError(f"{what} is {found!r}, which cannot be called: {fix}.")
    try:
        signature = inspect.signature(found)
    except ValueError:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{what} does not take what it is given ({error}): {fix}.") from error
