"""Finds a user's own sampler, strategy, executor or tracker by its dotted path, `module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpo.errors import UserError
from trainer.errors import ConfigError
from trainer.runtime.dotted import named


def is_own(name: object) -> bool:
    """Returns whether a name is the path of a user's own part."""
    return isinstance(name, str) and ":" in name


def own_part(kind: str, path: str, contract: type, methods: Sequence[str] = ()) -> Any:
    """Returns the class at `path`, which must derive from `contract` or, if `methods` are listed, have these.

    Raises UserError if the class does not exist.
    """
    try:
        part = named(path, f"the {kind} ")
    except ConfigError as error:
        raise UserError(str(error).replace(" =", " ", 1)) from error
    lacking = [name for name in methods if not callable(getattr(part, name, None))]
    if isinstance(part, type) and methods and lacking:
        raise UserError(f"the {kind} {path!r} has no method {lacking[0]}(), as docs/guide/extend.md shows it.")
    if not isinstance(part, type) or not (methods or contract in part.__mro__):
        raise UserError(
            f"the {kind} {path!r} does not derive from {contract.__module__}.{contract.__name__}, the contract of "
            f"{kind}s: derive it from that, as docs/guide/extend.md shows."
        )
    return part
