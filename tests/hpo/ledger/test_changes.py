"""Whoever waits for the ledger hears of each commit, and asks nothing meanwhile."""

from __future__ import annotations

import threading
import time

from hpo.ledger import Ledger, transactions
from hpo.ledger.changes import BEAT, Changes
from hpo.ledger.process_id import Process


def written(ledger: Ledger) -> None:
    ledger.transact(lambda connection: transactions.register(connection, Process.current(), "local"))


def test_a_commit_of_anyone_is_heard_once(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger, other = Ledger(url), Ledger(url, create=False)
    changes = Changes(ledger)
    assert changes() and not changes()
    for writer in (other, ledger):  # another process, and another connection of this one
        written(writer)
        assert changes() and not changes()
    other.look(lambda connection: connection.exec_driver_sql("SELECT 1").scalar())
    assert not changes(), "who reads writes nothing"
    changes.close()
    for one in (ledger, other):
        one.close()


def test_a_wait_ends_with_a_commit_its_time_or_its_sleeper(tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    changes = Changes(ledger)
    assert changes.wait(60.0)
    slept: list[float] = []
    assert not changes.wait(60.0, lambda seconds: slept.append(seconds) or len(slept) == 3)
    assert slept == [changes.pause] * 3
    assert not changes.wait(0.0)
    thread = threading.Timer(0.05, written, [ledger])
    thread.start()
    assert changes.wait(60.0)
    thread.join()
    ledger.close()


def test_without_a_counter_every_beat_counts_as_written(postgres_database):
    ledger = Ledger(postgres_database())
    changes = Changes(ledger)
    assert changes()
    began = time.monotonic()
    assert changes.wait(60.0)
    assert changes.pause <= BEAT and time.monotonic() - began < 60
    ledger.close()
