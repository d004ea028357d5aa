"""Tells all mistakes of a declaration at once, so that a user mends them in one go."""

from __future__ import annotations

from collections.abc import Iterable

from hpo.errors import SpaceError

_MOST = 12  # told of one declaration


def told(mistakes: Iterable[str]) -> None:
    """Raise SpaceError with a sentence for each mistake, a line for each where there are several; none, and nothing."""
    found = list(dict.fromkeys(mistakes))
    if not found:
        return
    more = [f"({len(found) - _MOST} more)"] if len(found) > _MOST else []
    if len(found) == 1:
        raise SpaceError(found[0])
    raise SpaceError("\n".join([f"{len(found)} mistakes:", *(f"  {one}" for one in found[:_MOST]), *more]))
