"""What every clock must do."""

from __future__ import annotations

import time

import pytest

from hpo.clock import Clock, FakeClock, SystemClock


@pytest.fixture(params=[SystemClock, lambda: FakeClock(start=-3.0)], ids=["system", "fake"])
def clock(request) -> Clock:
    return request.param()


def test_monotonic_time_never_goes_back_and_passes_by_what_was_slept(clock):
    before = clock.monotonic()
    clock.sleep(0.02)
    after = clock.monotonic()
    assert after - before >= 0.02 - 1e-9
    clock.sleep(0.0)
    assert clock.monotonic() >= after


def test_the_wall_is_seconds_and_goes_on_with_it(clock):
    before = clock.wall()
    clock.sleep(0.01)
    assert isinstance(before, float)
    assert clock.wall() > before


def test_the_wall_clock_is_the_epochs_and_a_fake_one_stands_until_slept():
    assert abs(SystemClock().wall() - time.time()) < 60
    fake = FakeClock(start=5.0)
    time.sleep(0.001)
    assert (fake.monotonic(), fake.wall()) == (5.0, 5.0)
