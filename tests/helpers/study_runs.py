"""Whole studies, by the command or by a driver of the test's own, and what the ledger knows of them."""

from __future__ import annotations

import sys
from contextlib import closing

from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.declaration.goal import NO_GOAL
from hpo.driver.loop import Driver
from hpo.driver.request import DriverOptions, request_of
from hpo.driver.resolve import declare
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home
from hpo.workers.executors.inline import Inline


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def refused(result, code: int) -> str:
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback (most recent call last)" not in result.stderr.split("failed in the same way")[0]
    return result.stderr


def make(
    home: Home,
    executor=None,
    *,
    trials=None,
    epochs=None,
    seconds=None,
    goal=NO_GOAL,
    allow_drift=False,
    **request,
) -> Driver:
    ledger = Ledger(home.create().storage)
    resolved = declare(request_of(home, **request), ledger, 1, lambda notice: print(notice, file=sys.stderr))
    bounds = {"trials": trials, "epochs": epochs, "seconds": seconds, "goal": goal}
    options = DriverOptions(home, ledger.url, home.tracking_uri, **bounds, allow_drift=allow_drift, lease_timeout=20)
    return Driver(ledger, resolved, options, executor or Inline())


def begin(home: Home, **flags) -> None:
    """Write a study down of which nothing has run. Unlike the command this takes every number of lanes as it is, and a
    study that has begun keeps it."""
    driver = make(home, **flags)
    driver.acquire()
    driver.release()


def drive(home: Home, executor=None, tick=lambda driver: None, **flags) -> tuple[str, queries.Status, str, str]:
    """Run a study without its mirror: digest, status, the state the driver left it in, and why."""
    driver = make(home, executor, **flags)
    driver.acquire()
    try:
        state = driver.run(lambda: tick(driver))
    finally:
        driver.release()
    return *known(home), state, driver.reason


def known(home: Home) -> tuple[str, queries.Status]:
    with Ledger(home.storage).read() as connection:
        [name] = queries.study_names(connection)
        return queries.digest(connection, queries.study_row(connection, name)), queries.status(connection, name)


def digest(home: Home, study: str) -> str:
    with closing(Ledger(home.storage, create=False)) as ledger, ledger.read() as connection:
        return queries.digest(connection, queries.study_row(connection, study))


def studies(home: Home) -> list[str]:
    with closing(Ledger(home.storage, create=False)) as ledger, ledger.read() as connection:
        return queries.study_names(connection)


def query(home: Home, statement):
    with Ledger(home.storage).read() as connection:
        return connection.execute(statement).all()
