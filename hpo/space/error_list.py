"""Reports all mistakes of a declaration at once, so that a user can correct them in one go."""

from __future__ import annotations

from collections.abc import Iterable

from hpo.errors import Mistakes, SpaceError
from trainer.quote import in_one_line

_MOST = 12  # mistakes shown of one declaration


def raise_all(mistakes: Iterable[str]) -> None:
    """Raises SpaceError for one mistake, or Mistakes with a line for each of several; returns if there is none."""
    sentences = list(dict.fromkeys(mistakes))
    if not sentences:
        return
    more = [f"({len(sentences) - _MOST} more)"] if len(sentences) > _MOST else []
    if len(sentences) == 1:
        raise SpaceError(sentences[0])
    shown = [f"  {in_one_line(sentence)}" for sentence in sentences[:_MOST]]
    raise Mistakes("\n".join([f"{len(sentences)} mistakes:", *shown, *more]))
