"""A commit whose answer is lost is tried again: nothing is doubled and nothing is lost, on SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from rounds import rounds
from sqlalchemy import insert, select

from hpo.clock import SystemClock
from hpo.ledger import Ledger, checkpoints, claims, leases, transactions, worker_rows
from hpo.ledger.database import tables
from hpo.ledger.process_id import Process
from hpo.ledger.views import driver as driver_queries
from trainer.errors import Fenced
from trainer.report import CheckpointRef, Outcome, Report, Verdict

ME = Process.current()
SPEC = {"objectives": [{"metric": "val/loss", "direction": "minimize", "select": "last"}], "metrics": ["val/*"]}


def lose_next_answer(ledger: Ledger, then: Callable[[], Any] = lambda: None) -> list[int]:
    """The next commit goes through, the connection breaks before its answer, and `then` happens before the retry.

    The list that is returned grows by one once it has happened.
    """
    dialect, lost = ledger.engine.dialect, []
    commit = dialect.do_commit

    def commit_and_break(connection: Any) -> None:
        commit(connection)
        dialect.do_commit = commit
        lost.append(1)
        then()
        if ledger.is_sqlite:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        connection.dbapi_connection.close() if hasattr(connection, "dbapi_connection") else connection.close()
        raise psycopg.OperationalError("consuming input failed: server closed the connection unexpectedly")

    dialect.do_commit = commit_and_break
    return lost


def begin(ledger: Ledger) -> None:
    row = {"name": "s", "uid": "u" * 32, "created_at": 0.0, "state": "open", "requested": 4, "spec": SPEC}
    with ledger.write() as connection:
        connection.execute(insert(tables.studies).values(**row, identity={}, environment={}))
        worker_rows.register(connection, ME, "inline")
    asks = [transactions.Ask(n, 0, 7, 0, {"lr": 0.1}, {"lr": 0.1}, {"a": n}, "h" * 64) for n in range(2)]
    ledger.transact(lambda c: transactions.ask(c, 1, asks))


def take(ledger: Ledger, token: str = "t") -> claims.Claim:
    [taken] = ledger.transact(lambda c: claims.claim(c, ME.id, token, [1]))
    return taken


def reported(taken: claims.Claim, step: int = 1, path: str = "c1") -> transactions.TrialReport:
    ref = CheckpointRef(Path(path), step, step, "s" * 64, 1)
    stop = Verdict("stop", reason="worse")
    return transactions.TrialReport(taken, Report(step, {"val/loss": 1.0}, step, ref), lambda _: stop, strategy="x")


MORE = [transactions.Ask(n, 0, 7, 0, {"lr": 0.1}, {"lr": 0.1}, {"a": n}, "h" * 64) for n in (1, 2)]
CHANGES = {"c1": {"best": 1}, "c0": {"state": "deleted"}}
# What is done with a trial that was claimed and has reported, step by step; each step is one transaction.
LIFE: dict[str, Callable[[Ledger, claims.Claim], Any]] = {
    "report": lambda ledger, taken: ledger.transact(lambda c: transactions.commit(c, [reported(taken, 2, "c2")])),
    "set_checkpoints": lambda ledger, taken: ledger.transact(lambda c: checkpoints.change(c, taken, CHANGES)),
    "record": lambda ledger, taken: ledger.transact(lambda c: transactions.record(c, taken, "e", {"x": 1}, "uid")),
    "renew": lambda ledger, taken: ledger.transact(lambda c: claims.renew(c, taken)),
    "finish": lambda ledger, taken: ledger.transact(
        lambda c: transactions.finish(c, taken, Outcome("pruned", 1, 1), [1.0]) or "finished"
    ),
    "lose": lambda ledger, taken: ledger.transact(lambda c: transactions.lose(c, taken.trial_id, taken.fence, "gone")),
    "ask": lambda ledger, _: ledger.transact(lambda c: transactions.ask(c, 1, MORE, [(0, 0)])),
    "note": lambda ledger, _: ledger.transact(lambda c: transactions.note(c, 1, "drift", {}, "uid")),
    "claim": lambda ledger, _: take(ledger, "second"),
    "thaw": lambda ledger, _: ledger.transact(lambda c: driver_queries.thaw(c, 1, [0])),
    "acquire": lambda ledger, _: leases.acquire(ledger, "driver:1", "s", ME, SystemClock(), 5).fence,
}
PASSING = {
    "revision",
    "renewals",
    "at",
    "created_at",
    "started_at",
    "ended_at",
    "since",
}  # may differ: counters, clocks


def contents(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    with ledger.read() as connection:
        return {
            table.name: [
                {key: value for key, value in row.items() if key not in PASSING}
                for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()
            ]
            for table in tables.metadata.sorted_tables
        }


@rounds("what", LIFE)
def test_a_lost_answer_leaves_the_ledger_as_one_that_came(what, ledger):
    """The oracle: the same steps without the fault give the same rows and the same answer."""
    outcomes = []
    for fault in (False, True):
        with ledger.write() as connection:
            for table in reversed(tables.metadata.sorted_tables):
                connection.execute(table.delete())
            if not ledger.is_sqlite:
                connection.exec_driver_sql("SELECT setval(c.oid, 1, false) FROM pg_class c WHERE relkind = 'S'")
        begin(ledger)
        taken = take(ledger)
        ledger.transact(
            lambda c, taken=taken: transactions.commit(c, [reported(taken, 1, "c0"), reported(taken, 1, "c1")])
        )
        lost = lose_next_answer(ledger) if fault else [1]
        answer = LIFE[what](ledger, taken)
        assert lost, "the fault did not happen"
        outcomes.append((answer, contents(ledger)))
    (answer, rows), (answer_again, rows_again) = outcomes
    assert rows_again == rows
    assert answer_again == answer


def test_a_claim_whose_answer_was_lost_is_found_again(ledger):
    begin(ledger)
    lost = lose_next_answer(ledger)
    taken = take(ledger)
    assert lost
    assert (taken.number, taken.fence) == (0, 1)
    with ledger.read() as connection:
        assert connection.execute(select(tables.trials.c.state).order_by(tables.trials.c.number)).scalars().all() == [
            "running",
            "waiting",
        ]
    assert take(ledger, "another").number == 1


def test_a_finish_whose_answer_was_lost_stands_though_the_trial_moved_on(ledger):
    begin(ledger)
    taken = take(ledger)
    other = Ledger(ledger.url)
    lose_next_answer(ledger, then=lambda: take(other, "another"))
    ledger.transact(lambda c: transactions.finish(c, taken, Outcome("preempted", 1, 1), None))
    other.close()
    a = tables.attempts.c
    mine = select(a.fence, a.outcome).where(a.trial_id == taken.trial_id).order_by(a.fence)
    assert ledger.look(lambda c: c.execute(mine).all()) == [(1, "preempted"), (2, None)]


def test_a_report_whose_answer_was_lost_is_committed_despite_the_fence(ledger):
    begin(ledger)
    taken = take(ledger)
    other = Ledger(ledger.url)
    lose_next_answer(
        ledger, then=lambda: other.transact(lambda c: transactions.lose(c, taken.trial_id, taken.fence, "silent"))
    )
    [answer] = ledger.transact(lambda c: transactions.commit(c, [reported(taken)]))
    assert isinstance(answer, Fenced)
    assert ledger.look(lambda c: checkpoints.committed_paths(c, taken)) == {"c1"}, "so its files must not be swept"
    other.close()


def test_a_thaw_whose_answer_was_lost_is_one_step_though_it_paused_again(ledger):
    begin(ledger)

    def pause(token: str) -> int:
        taken = take(ledger, token)
        ledger.transact(lambda c: transactions.finish(c, taken, Outcome("paused", 1, 1), [0.5]))
        return taken.fence

    fence = pause("first")
    lost = lose_next_answer(ledger, lambda: pause("second"))
    ledger.transact(lambda c: transactions.go_on(c, 1, 0, fence, 2))
    state = select(tables.trials.c.state).where(tables.trials.c.number == 0)
    assert lost and ledger.look(lambda c: c.execute(state).scalar_one()) == "paused"
    assert ledger.look(lambda c: driver_queries.thaws(c, 1)) == [(0, 2)]
