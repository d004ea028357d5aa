"""Measures the time that a study has been driven."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hpo.clock import Clock

LOOK = 0.01  # of the bound, between two looks at what is reserved
SHORTEST = 0.2  # seconds between them


class Alarm:
    """Calls `action` once, in its own thread, as soon as `left()` seconds are none.

    It asks for them anew after at most `every` seconds.
    """

    def __init__(self, left: Callable[[], float], action: Callable[[], None], every: float) -> None:
        self._left, self._action, self._every = left, action, every
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="alarm", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Waits until the thread has ended; it calls nothing afterwards."""
        self._cancelled.set()
        self._thread.join()

    def _wait(self) -> None:
        while (left := self._left()) > 0:
            if self._cancelled.wait(min(left, self._every)):
                return
        self._action()


class Stopwatch:
    """Counts the seconds used while it runs. One thread starts and stops it; others may read it."""

    def __init__(self, clock: Clock, used: float = 0.0) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = (used, None)  # always replaced as a whole

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

    def alarm(self, bound: float, reserved: Callable[[], float], action: Callable[[], None]) -> Alarm:
        """Calls `action` once all but the `reserved` ones of `bound` seconds are used. It runs in its own thread, since
        an executor may be training in the driver's."""
        return Alarm(lambda: bound - reserved() - self.seconds, action, max(LOOK * bound, SHORTEST))
