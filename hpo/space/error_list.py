"""Reports all mistakes of a declaration at once, so that a user can correct them in one go."""

from __future__ import annotations

from collections.abc import Iterable

from hpo.errors import SpaceError

_MOST = 12  # mistakes shown of one declaration


def raise_all(mistakes: Iterable[str]) -> None:
    """Raises SpaceError with a sentence for each mistake, one per line; returns if there is none."""
    sentences = list(dict.fromkeys(mistakes))
    if not sentences:
        return
    more = [f"({len(sentences) - _MOST} more)"] if len(sentences) > _MOST else []
    if len(sentences) == 1:
        raise SpaceError(sentences[0])
    shown = [f"  {sentence}" for sentence in sentences[:_MOST]]
    raise SpaceError("\n".join([f"{len(sentences)} mistakes:", *shown, *more]))
