"""Things of the user's own, named in a configuration as `package.module:name`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trainer.errors import ConfigError

PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


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
