"""Handles SIGINT, SIGTERM and SIGHUP while a study runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from hpo.driver.drivers import StudyDriver
from hpo.terminal import print, urgent
from trainer.files import outage

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED = "all trials have ended, and the study with them: nothing is left to be stopped."


def leave(number: int) -> NoReturn:
    """Ends this process with 128 plus the signal's number, as shells do: 130 for SIGINT."""
    os._exit(128 + number)


class Signals:
    """Stops gracefully at the first SIGINT, SIGTERM or SIGHUP, and `at_once` at the second.

    In Python only the main thread can handle signals; in any other thread this handles none.
    """

    def __init__(
        self,
        driver: StudyDriver,
        kill_mirror: Callable[[], None],
        resume: str,
        at_once: Callable[[int], NoReturn] = leave,
    ) -> None:
        self._driver, self._kill_mirror, self._resume, self._at_once = driver, kill_mirror, resume, at_once
        self.first: int | None = None
        self.trained = False  # True once no trial runs any more and only MLflow is behind
        self._untold = ""

    def untold(self) -> str:
        """Returns a notice for the user, once; the display of the run prints it."""
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
            outage.leave_soon()
            text = f"stopping: trials are saved and wait for `{self._resume}`; once more stops at once."
            if self.trained:
                _tell(f"trials have ended and MLflow takes the rest; once more leaves that to `{self._resume}`.")
            else:
                self._untold = text
                if sys.stderr.isatty() and not sys.stdout.isatty():  # the display is not on the user's terminal
                    _tell(text)
        else:
            self._driver.kill()
            self._kill_mirror()
            rest = "sends MLflow the rest" if self.trained else "goes on from the last committed checkpoints"
            _tell(f"stopped at once: `{self._resume}` {rest}.")
            self._at_once(number)


def _tell(text: str) -> None:
    """Prints from a signal handler, which may interrupt a write to the same stream.

    On a terminal it shows the cursor, which the live table hides, and clears the rest of that table below it. In a
    notebook `print` is safe and reaches the cell, while file descriptor 2 belongs to the server.
    """
    if _in_notebook():
        print(text, file=sys.stderr)
        return
    clear = "\x1b[?25h\x1b[J" if sys.stderr.isatty() else ""
    urgent(text, f"\n{clear}")


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
