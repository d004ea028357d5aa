"""Measures the time that a study has been driven."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from hpo.clock import Clock


class Stopwatch:
    """Seconds used, counted on while it runs. One thread starts and stops it, others may read it."""

    def __init__(self, clock: Clock, used: float = 0.0) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = (used, None)  # replaced as one

    @property
    def seconds(self) -> float:
        used, since = self._state
        return used if since is None else used + self._clock.monotonic() - since

    @property
    def runs(self) -> bool:
        return self._state[1] is not None

    def start(self) -> None:
        self._state = (self.seconds, self._clock.monotonic())

    def stop(self) -> None:
        self._state = (self.seconds, None)

    def alarm(self, bound: float | None, action: Callable[[], None]) -> threading.Timer:
        """Calls `action` when `bound` seconds are used, if there is a bound, from a thread of its own: an executor may
        be training in the driver's."""
        timer = threading.Timer(math.inf if bound is None else bound - self.seconds, action)
        timer.daemon = True
        if bound is not None:
            timer.start()
        return timer
