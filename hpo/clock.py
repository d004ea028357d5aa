"""Injects time: real and fake clocks for the driver and its strategies, and pauses that grow."""

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
    """A clock that advances only when a caller sleeps; for simulation and tests."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Backoff:
    """A pause that doubles from `first` to `longest` seconds while an operation keeps failing."""

    def __init__(self, first: float, longest: float) -> None:
        self.seconds = self._first = first
        self._longest = longest

    def grow(self) -> None:
        self.seconds = min(2 * self.seconds, self._longest)

    def reset(self) -> None:
        self.seconds = self._first
