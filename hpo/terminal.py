"""Prints for people, so that nothing in a name, a tag or an error acts on the terminal that shows it.

The modules of hpo print by this function alone (`from hpo.terminal import print`) and draw on
`hpo.cli.console.Console`; a test holds them to it. JSON passes unchanged, since it is ASCII.
"""

from __future__ import annotations

import builtins
from typing import Any

from trainer.quote import visible


def print(*words: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
    """Prints as Python's own `print` does, with unseen characters as escapes."""
    builtins.print(*(visible(str(word)) for word in words), sep=sep, end=end, file=file, flush=flush)


def rewrite(text: str, file: Any) -> None:
    """Writes `text` over the line of a terminal in which the cursor stands; no text clears it."""
    builtins.print(f"\r\x1b[K{visible(text)}", end="", file=file, flush=True)
