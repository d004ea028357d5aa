"""Injects time: the clock that the driver and its strategies read, real or fake."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. `monotonic` decides (leases, timeouts); `wall` is only ever shown or sent to a tracker."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class FakeClock:
    """A clock that stands until somebody sleeps; for simulation and tests."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
