"""Imports a user's own function or class that a configuration names as `package.module:name`."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from trainer.errors import ConfigError


def named(text: str, field: str) -> Any:
    """Returns the object that `text`, the value of `field`, names.

    Raises ConfigError if it does not exist; an error in the module's own imports is raised as it is.
    """
    where, _, name = text.partition(":")
    try:
        module = import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{field}={text!r}: module {where!r} does not exist; put it beside the study's file or on PYTHONPATH."
        ) from error
    if not hasattr(module, name):
        alike = get_close_matches(name, vars(module), 1)
        hint = f"; did you mean '{where}:{alike[0]}'?" if alike else "."
        raise ConfigError(f"{field}={text!r}: {module.__file__} has no {name!r}{hint}")
    return getattr(module, name)


def check_call(found: Any, what: str, fix: str, *args: Any, **kwargs: Any) -> None:
    """Raises ConfigError, `what` then `fix`, if `found` does not take these arguments; it is not called.

    Callables without a readable signature, such as some classes written in C, pass.
    """
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
