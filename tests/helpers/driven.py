"""Studies driven to their end in this process, without their mirror."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from hpo.driver.loop import Driver
from hpo.driver.request import DriverOptions, RunRequest
from hpo.driver.resolve import declare
from hpo.ledger import Ledger
from hpo.workers.executors.inline import Inline


def driven(
    ledger: Ledger,
    request: RunRequest,
    executor: Any = None,
    *,
    workers: int = 1,
    tick: Callable[[Driver], None] = lambda _: None,
    **options: Any,
) -> tuple[str, str]:
    """Drive what `request` asks for, inline unless an executor is given: the study's name, and the state it is left in.

    `options` are those of the run (`trials`, `epochs`, ...); `tick` is called between a driver's rounds.
    """
    resolved = declare(request, ledger, workers, lambda notice: print(notice, file=sys.stderr))
    home = request.home
    driver = Driver(
        ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, **options), executor or Inline()
    )
    driver.acquire()
    try:
        return resolved.spec.name, driver.run(lambda: tick(driver))
    finally:
        driver.release()


def turn(driver: Driver) -> bool:
    """Has a driver observe, decide and commit once, as before each step of its workers; whether the study is done."""
    while True:
        driver.study.observe()
        actions = driver.study.frontier.next()
        driver.study.commit(actions)
        if not actions.retire:
            return actions.done


def stopping(after: int) -> Callable[[Driver], None]:
    """Returns a tick that asks the driver to stop the `after`-th time that it is called."""
    ticks = count(1)

    def tick(driver: Driver) -> None:
        if next(ticks) == after:
            driver.request_stop()

    return tick
