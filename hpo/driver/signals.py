"""Handles SIGINT, SIGTERM and SIGHUP while a study runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from hpo.driver.loop import Driver
from hpo.terminal import print
from trainer.quote import visible

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED = "all trials have ended, and the study with them: nothing is left to be stopped."


def leave(number: int) -> NoReturn:
    """End this process, with 130 for SIGINT, as shells have it."""
    os._exit(128 + number)


class Signals:
    """The first SIGINT, SIGTERM or SIGHUP stops gracefully, the second `at_once`. Python lets its main thread alone
    handle signals; in another thread none are heard."""

    def __init__(
        self, driver: Driver, kill_mirror: Callable[[], None], resume: str, at_once: Callable[[int], NoReturn] = leave
    ) -> None:
        self._driver, self._kill_mirror, self._resume, self._at_once = driver, kill_mirror, resume, at_once
        self.first: int | None = None
        self.trained = False  # no trial runs any more: only MLflow is behind
        self._untold = ""

    def untold(self) -> str:
        """What the user is to be told, once, by what shows the run, which also knows what is waited for."""
        text, self._untold = self._untold, ""
        return _ENDED if text and self._driver.all_ended() else text

    def __enter__(self) -> Signals:
        heard = _STOPPING if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = number
            self._driver.request_stop()
            text = f"stopping: trials are saved and wait for `{self._resume}`; once more stops at once."
            if self.trained:
                _tell(f"trials have ended and MLflow takes the rest; once more leaves that to `{self._resume}`.")
            else:
                self._untold = text
                if sys.stderr.isatty() and not sys.stdout.isatty():  # who looks on does not see what is shown
                    _tell(text)
        else:
            self._driver.kill()
            self._kill_mirror()
            rest = "sends MLflow the rest" if self.trained else "goes on from the last committed checkpoints"
            _tell(f"stopped at once: `{self._resume}` {rest}.")
            self._at_once(number)


def _tell(text: str) -> None:
    """Print from a signal handler, where streams may be in the middle of something else.

    On a terminal, show the cursor and clear what is below it: the live table hides the one and leaves its rest. In a
    notebook the cell shows what is printed, which may be done there, and file descriptor 2 is the server's.
    """
    if _in_notebook():
        print(text, file=sys.stderr)
        return
    clear = "\x1b[?25h\x1b[J" if sys.stderr.isatty() else ""
    os.write(2, f"\n{clear}{visible(text)}\n".encode(errors="replace"))


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
