"""Prints for people, so that nothing in a name, a tag or an error acts on the terminal.

The modules of hpo print by this function alone (`from hpo.terminal import print`) and draw on
`hpo.display.console.Console`; a test holds them to it. JSON passes unchanged, since it is ASCII.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from typing import Any

from trainer.quote import visible


def print(*words: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
    """Prints as Python's own `print` does, with unseen characters as escapes."""
    builtins.print(*(visible(str(word)) for word in words), sep=sep, end=end, file=file, flush=flush)


def rewrite(text: str, file: Any) -> None:
    """Writes `text` over the terminal line with the cursor; no text clears it."""
    builtins.print(f"\r\x1b[K{visible(text)}", end="", file=file, flush=True)


def urgent(text: str, lead: str = "\n") -> None:
    """Prints from a signal handler, which may interrupt a write to the same stream; text comes after `lead`."""
    line_of = getattr(sys.stderr, "line_of", lambda shown: f"{lead}{shown}")  # of hpo.event_log
    os.write(2, f"{line_of(visible(text))}\n".encode(errors="replace"))


def number_of(interruption: KeyboardInterrupt) -> int:
    """Returns the signal that has interrupted a command."""
    return interruption.args[0] if interruption.args else signal.SIGINT
