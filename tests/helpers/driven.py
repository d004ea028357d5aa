"""Studies driven to their end in this process, without their mirror."""

from __future__ import annotations

from collections.abc import Callable
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
    resolved = declare(request, ledger, workers=workers)
    home = request.home
    driver = Driver(
        ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, **options), executor or Inline()
    )
    driver.acquire()
    try:
        return resolved.spec.name, driver.run(lambda: tick(driver))
    finally:
        driver.release()
