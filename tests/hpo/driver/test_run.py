"""What a run says at its end."""

from __future__ import annotations

from contextlib import closing

import pytest
from crafted import open_crafted, put_trial

from hpo.driver.run import damage_of_ledger
from hpo.ledger import Ledger
from hpo.tracking.lag import DrainResult, lag


@pytest.fixture
def filled(home) -> Ledger:
    home.create()
    ledger = open_crafted(home.root / "ledger.db")
    for number in range(50):
        put_trial(ledger, number, "complete", (0.1,) * 20)
    return ledger


def test_a_ledger_that_is_damaged_is_why_mlflow_is_behind(home, filled):
    with closing(filled):
        assert damage_of_ledger(filled) == ""
    file = home.root / "ledger.db"
    with file.open("r+b") as database:
        size = database.seek(0, 2)
        for page in range(9 * size // 4096 // 10, size // 4096):  # of the reports, which came last
            database.seek(page * 4096)
            database.write(b"\xff" * 64)
    with closing(Ledger(home.storage, create=False)) as damaged:
        told = damage_of_ledger(damaged)
    assert str(home.root / "ledger.db") in told and "damaged" in told and "from a backup, or choose another" in told


def test_what_is_damaged_is_not_promised_to_be_whole():
    told = "the ledger x failed (the file is damaged: restore it from a backup)"
    assert lag(DrainResult(0, 5, told), "http://h:5000").endswith(f"is behind by 5 transactions: {told}")
    assert lag(DrainResult(0, 5, "it does not answer"), "http://h:5000").endswith("`hpo sync`; nothing is lost.")
