"""The tiny study of the kill tests, driven in this process."""

from __future__ import annotations

from collections.abc import Callable

from driven import driven
from places import HARNESS
from sqlalchemy import select

from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home

TINY = str(HARNESS / "tiny_study.py")


FULL = {"pause": 0.0, "train.num_epochs": 4}


PROMOTE = {"sampler": "tpe", "strategy": "asha-promote", "overrides": FULL | {"train.checkpoint.every_steps": 3}}


def drive(
    home: Home,
    executor=None,
    *,
    workers=1,
    bound=None,
    allow_drift=False,
    reference=TINY,
    tick: Callable[[Driver], None] = lambda _: None,
    **flags,
):
    """Drive the tiny study to its end or its interruption: the ledger, and the state it is left in."""
    ledger = Ledger(home.create().storage)
    options = {**(bound or {"trials": 14}), "allow_drift": allow_drift, "lease_timeout": 20}
    request = request_of(home, reference=reference, **flags)
    return ledger, driven(ledger, request, executor, workers=workers, tick=tick, **options)[1]


def rows(ledger: Ledger, *columns) -> list[tuple]:
    return [tuple(row) for row in ledger.look(lambda c: c.execute(select(*columns)).all())]


def digest(ledger: Ledger) -> str:
    return ledger.look(lambda c: queries.digest(c, queries.study_row(c, "tiny")))
