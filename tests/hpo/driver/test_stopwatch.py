"""The alarm of a study's time, of which a part may be reserved."""

from __future__ import annotations

import threading

from hpo.clock import SystemClock
from hpo.driver.stopwatch import Alarm, Stopwatch


def test_an_alarm_asks_again_how_much_time_is_left():
    left, rung = iter([9.0, 9.0, 0.0]), threading.Event()
    alarm = Alarm(lambda: next(left), rung.set, every=0.001)
    assert rung.wait(60)
    alarm.cancel()
    assert next(left, None) is None


def test_a_cancelled_alarm_does_nothing_and_leaves_no_thread():
    rung = threading.Event()
    alarm = Alarm(lambda: 1000.0, rung.set, every=1000.0)
    alarm.cancel()
    assert not rung.is_set() and not alarm._thread.is_alive()


def test_what_is_reserved_is_not_left():
    """Nothing is used, and all of a thousand seconds are reserved."""
    rung = threading.Event()
    Stopwatch(SystemClock()).alarm(1000.0, lambda: 1000.0, rung.set).cancel()
    assert rung.is_set()
