"""Finds a private name of torch, or reports which version has it."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any

from trainer.errors import TrainerError

SEEN: dict[str, str] = {}  # "module:name" of each name looked up -> the version of torch in which it was seen last


def private(name: str, *, seen: str) -> Any:
    """Returns the object that `module:attribute.attribute` names in torch.

    Raises TrainerError if this torch lacks it, with the version in which it was seen last.
    """
    SEEN[name] = seen
    module, _, attributes = name.partition(":")
    try:
        return reduce(getattr, attributes.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        import torch

        raise TrainerError(
            f"torch {torch.__version__} has no {name.replace(':', '.')}, which was seen in torch {seen} last: install "
            f"torch {seen}."
        ) from error
