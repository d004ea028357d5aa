"""Whoever waits for the ledger hears of each commit, and asks nothing meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from hpo.ledger import Ledger, worker_rows
from hpo.ledger.database.changes import POLL, Changes, announce
from hpo.ledger.process_id import Process


def written(ledger: Ledger) -> None:
    ledger.transact(lambda connection: worker_rows.register(connection, Process.current(), "local"))


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


@pytest.fixture
def served(postgres_database):
    """The URL of an empty ledger on a real PostgreSQL, with a waiting process that listens."""
    url = postgres_database()
    ledger = Ledger(url)
    changes = Changes(ledger)
    yield ledger, changes
    changes.close()
    ledger.close()


def listening(changes: Changes) -> None:
    """Wait until notifications are heard, and everything so far has been."""
    deadline = time.monotonic() + 30.0
    while not changes._listener.listens or changes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def seconds_until_heard(changes: Changes) -> float:
    began = time.monotonic()
    assert changes.wait(60.0)
    return time.monotonic() - began


def test_a_notification_is_heard_at_once_and_others_are_not(served):
    ledger, changes = served
    listening(changes)
    timer = threading.Timer(0.2, ledger.transact, [announce])
    timer.start()
    assert seconds_until_heard(changes) < POLL / 2
    timer.join()
    written(ledger)
    assert not changes.wait(0.5), "what lets nobody act notifies nobody"


def test_a_lost_notification_costs_the_polling_interval(served):
    """The server has forgotten who listens, as it does behind some poolers."""
    ledger, changes = served
    changes._poll = 1.0
    listening(changes)
    with ledger.engine.connect() as connection:
        mine = "pid <> pg_backend_pid() AND datname = current_database() AND query LIKE 'LISTEN%%'"
        ended = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {mine}"
        assert connection.exec_driver_sql(ended).scalar() == 1, "one connection listens"
    for _ in range(3):
        ledger.transact(announce)
        assert seconds_until_heard(changes) < 1.0 + POLL / 2
    listening(changes)  # it has begun to listen again


def test_a_process_listens_over_one_connection(served):
    ledger, changes = served
    other = Ledger(ledger.url, create=False)
    more = [Changes(each) for each in (ledger, other, other)]
    listening(changes)
    with ledger.engine.connect() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
        assert connection.exec_driver_sql(query).scalar() == 1
    for each in more:
        each.close()
    assert more[0]() and more[0](), "who has closed it takes the ledger as written"
    other.close()
