"""Finds what a declaration names by a string, "package.module:name", absolute or relative to the declaring module."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hpo.errors import NO_TORCH, StudyError, needs_torch
from hpo.text import near


def load(study: str, module: str, what: str, given: str, kind: type) -> Any:
    """Imports and returns what `given` names in the field `what` of a study that `module` declares; it has type `kind`.

    Raises StudyError if the name leads nowhere.
    """
    where, name = _split(study, module, what, given)
    try:
        loaded = import_module(where)
    except ModuleNotFoundError as error:
        raise _no_module(study, what, given, where, error) from error
    if not isinstance(target := getattr(loaded, name, None), kind):
        noun = "class" if kind is type else "function"
        hint = near(name, (key for key, value in vars(loaded).items() if isinstance(value, kind))) or "."
        raise StudyError(f"study {study!r}: {what}={given!r}: {where} has no {noun} {name!r}{hint}")
    return target


def check_module(study: str, module: str, what: str, given: str) -> None:
    """Raises StudyError if no module has that name; imports only its packages."""
    where, _ = _split(study, module, what, given)
    try:
        exists = where in sys.modules or find_spec(where)
    except ModuleNotFoundError as error:
        raise _no_module(study, what, given, where, error) from error
    if not exists:
        raise StudyError(f"study {study!r}: {what}={given!r}: module {where!r} does not exist.")


def _no_module(study: str, what: str, given: str, where: str, error: ModuleNotFoundError) -> Exception:
    """Returns an error for a missing module or a missing PyTorch.

    Another bug in the module's imports is returned as it is, with its traceback.
    """
    if needs_torch(error):
        return StudyError(f"study {study!r} trains with {NO_TORCH}.")
    if error.name is None or not f"{where}.".startswith(f"{error.name}."):
        return error
    return StudyError(f"study {study!r}: {what}={given!r}: module {where!r} does not exist.")


def _split(study: str, module: str, what: str, given: str) -> tuple[str, str]:
    """Returns the module and the name in it from "package.module:name"."""
    where, colon, name = given.partition(":")
    if not colon or not name:
        raise StudyError(f"study {study!r}: {what}={given!r} must read 'package.module:name'.")
    if where.startswith(".") or not where:
        if not module:
            raise StudyError(f"study {study!r}: {what}={given!r} is relative; load the study with hpo.load.")
        package = getattr(sys.modules[module], "__package__", None)
        where = (package + where if package else where.lstrip(".")) if where.strip(".") else module
    return where, name
