"""What every ledger must do, on SQLite and on PostgreSQL."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, insert, select
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import FakeClock, SystemClock
from hpo.declaration.budget import Budget
from hpo.errors import Busy, HpoError, StorageError, UserError
from hpo.ledger import Ledger, checkpoints, claims, queries, removal, tags, transactions, worker_rows
from hpo.ledger.database import schema, store, tables
from hpo.ledger.history import Curves
from hpo.ledger.leases import Heartbeat, acquire, holder
from hpo.ledger.migrations import upgrade
from hpo.ledger.process_id import Process, is_dead, start_time
from hpo.ledger.strategy_history import LedgerHistory
from hpo.ledger.views import driver as driver_queries
from hpo.space.objective import Objective
from hpo.tracking.base import Unreachable
from trainer.errors import Fenced
from trainer.report import CONTINUE, CheckpointRef, Outcome, Report, Verdict

SPEC = {
    "objectives": [{"metric": "val/loss", "direction": "minimize", "select": "last"}],
    "metrics": ["train/loss", "val/*"],
    "strategy": {"name": "none"},
}
ME = Process.current()


def new_study(ledger: Ledger, name: str = "s") -> int:
    row = {"name": name, "uid": "u" * 32, "created_at": 0.0, "state": "open", "requested": 4, "spec": SPEC}
    with ledger.write() as connection:
        query = insert(tables.studies).values(**row, identity={}, environment={}).returning(tables.studies.c.id)
        study_id = connection.execute(query).scalar_one()
        worker_rows.register(connection, ME, "inline")
    return study_id


def ask(ledger: Ledger, study_id: int, *numbers: int) -> None:
    asks = [
        transactions.Ask(n, 0, 7, 0, {"train.optim.lr": 0.1 * (n + 1)}, {"train.optim.lr": 0.1}, {"a": n}, "h" * 64)
        for n in numbers
    ]
    ledger.transact(lambda connection: transactions.ask(connection, study_id, asks))


def claim(ledger: Ledger) -> claims.Claim:
    [taken] = claim_all(ledger)
    return taken


def claim_all(ledger: Ledger, n: int = 1) -> list[claims.Claim]:
    token = uuid.uuid4().hex
    return ledger.transact(lambda connection: claims.claim(connection, ME.id, token, [1], n))


def report(ledger: Ledger, taken: claims.Claim, step: int, decide=None, epoch=None, **metrics: float):
    told = transactions.TrialReport(taken, Report(step, metrics, epoch or step), decide, strategy="x")
    [answer] = ledger.transact(lambda connection: transactions.commit(connection, [told]))
    return answer


def values(ledger: Ledger) -> dict[tuple[int, str], float]:
    with ledger.read() as connection:
        return {(step, key): value for _, key, step, _, value in queries.curves(connection, 1)}


def count(ledger: Ledger, table: sa.Table) -> int:
    with ledger.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_the_migrations_give_the_tables(storage):
    engine = sa.create_engine(storage)
    with engine.begin() as connection:
        upgrade(connection)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    engine.dispose()
    Ledger(storage, create=False).close()  # and are taken for what they are


def test_a_ledger_of_the_first_schema_opens_with_its_budget_of_trials(storage):
    engine = sa.create_engine(storage)
    with engine.begin() as connection:
        upgrade(connection, "0001")
        row = "1, 's', 'u', 0, 'open', 4, '{}', '{}', '{}', 0"
        names = "id, name, uid, created_at, state, requested, spec, identity, environment, revision"
        connection.exec_driver_sql(f"INSERT INTO studies ({names}) VALUES ({row})")
    with pytest.raises(
        StorageError, match=rf"older release \(schema 0001, now {schema.SCHEMA_VERSION}\): `hpo resume`"
    ):
        Ledger(storage, create=False)  # who only reads changes nothing
    with engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "0001"
    engine.dispose()
    ledger = Ledger(storage, create=False, upgrade=True)
    with ledger.read() as connection:
        found = queries.study_row(connection, "s")
    assert (Budget.of(found), found.seconds_used) == (Budget(trials=4), 0.0)
    ledger.close()


def expanded(storage: str, oldest: str) -> None:
    """Does what a later release's migration would do: adds a table and columns, and leaves its schema."""
    Ledger(storage).close()
    engine = sa.create_engine(storage)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE later (id INTEGER PRIMARY KEY)")
        for table in ("studies", "trials", "reports", "leases", "workers"):
            connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN later VARCHAR(32)")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        connection.execute(tables.compatibility.update().values(schema=oldest, release="7.0.0"))
    engine.dispose()


def test_a_ledger_that_a_later_release_has_expanded_serves_this_one(storage):
    expanded(storage, schema.SCHEMA_VERSION)
    ledger = Ledger(storage)
    Ledger(storage, create=False).close()
    process = Process.current()
    ledger.transact(lambda connection: worker_rows.register(connection, process, "inline"))
    lease = acquire(ledger, "driver:1", "s", process, SystemClock(), 0)
    lease.renew()
    with ledger.read() as connection:
        held = holder(connection, "driver:1")
        assert schema.read(connection).version == "9999"
    assert held is not None and held.schema == schema.SCHEMA_VERSION
    ledger.close()


def test_a_ledger_that_a_later_release_has_closed_to_this_one_is_refused(storage):
    expanded(storage, "9999")
    said = rf"newer release \(schema 9999, known {schema.SCHEMA_VERSION}\), which release 7.0.0 and later can use"
    for create in (True, False):
        with pytest.raises(StorageError, match=said):
            Ledger(storage, create=create)


def test_resume_brings_an_older_ledger_to_this_release(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/ledger.db")
    with engine.begin() as connection:
        upgrade(connection, "0001")
    flags = ["--home", str(tmp_path)]
    assert "older release" in CliRunner().invoke(app, ["status", *flags]).stderr
    assert "holds no study" in CliRunner().invoke(app, ["resume", *flags]).stderr  # and is upgraded
    assert "holds no study" in CliRunner().invoke(app, ["status", *flags]).stderr
    engine.dispose()


@pytest.mark.usefixtures("process")
def test_many_processes_may_open_a_new_database_at_once(storage, capfd):
    forked = multiprocessing.get_context("fork")
    start = forked.Barrier(8)

    def opens() -> None:
        start.wait()
        Ledger(storage).close()

    opened = [forked.Process(target=opens) for _ in range(8)]
    for process in opened:
        process.start()
    for process in opened:
        process.join()
    assert ([process.exitcode for process in opened], capfd.readouterr().err) == ([0] * 8, "")


def test_a_ledger_that_is_locked_while_it_is_opened_is_waited_for(tmp_path, monkeypatch):
    """As where two processes turn a new file to WAL, when SQLite does not wait."""
    monkeypatch.setattr(store, "BUSY_SECONDS", 0.0)
    holder = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("CREATE TABLE other (x)")
    threading.Timer(0.5, holder.execute, ["COMMIT"]).start()
    Ledger(f"sqlite:///{tmp_path / 'ledger.db'}").close()
    holder.close()


def test_a_trial_is_claimed_once_however_many_ask_for_it(ledger):
    study_id = new_study(ledger)
    ask(ledger, study_id, *range(12))
    taken: list[int] = []
    lock, start = threading.Lock(), threading.Barrier(4)

    def grab() -> None:
        start.wait()
        while found := claim_all(ledger, 2):
            with lock:
                taken.extend(c.number for c in found)

    threads = [threading.Thread(target=grab) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(taken) == list(range(12))


def test_claims_come_lowest_number_first_and_carry_the_ask(ledger):
    ask(ledger, new_study(ledger), 0, 1)
    first, second = claim(ledger), claim(ledger)
    assert (first.number, second.number) == (0, 1)
    assert (first.params, first.config, first.fence) == ({"train.optim.lr": 0.1}, {"a": 0}, 1)
    assert claim_all(ledger) == []


def test_the_same_ask_twice_is_one_trial(ledger):
    study_id = new_study(ledger)
    ask(ledger, study_id, 0, 1)
    ask(ledger, study_id, 0, 1, 2)
    assert count(ledger, tables.trials) == count(ledger, tables.asks) == 3


def test_studies_derived_from_others_are_told_apart(ledger):
    """A null, an absent and a given `listed_of`, as ledgers of any age have them."""
    for name, more in (("s", {"listed_of": None}), ("s-confirm", {"listed_of": "s"}), ("old", {})):
        with ledger.write() as connection:
            row = {"name": name, "uid": "u" * 32, "created_at": 0.0, "state": "open", "requested": 4}
            connection.execute(insert(tables.studies).values(**row, spec=SPEC | more, identity={}, environment={}))
    with ledger.read() as connection:
        assert queries.derived(connection) == {"s-confirm": "s"}


def test_floats_come_back_to_the_last_bit(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    odd = {"a": 0.1 + 0.2, "b": 5e-324, "c": math.inf, "d": -math.inf, "e": math.nan, "f": 1.7976931348623157e308}
    report(ledger, taken, 1, **odd)
    assert {key: repr(value) for (_, key), value in values(ledger).items()} == {k: repr(v) for k, v in odd.items()}


def test_the_first_value_stands_and_a_differing_replay_is_shown(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    report(ledger, taken, 1, **{"val/loss": 1.0, "time/epoch": 3.0})
    ledger.transact(lambda c: transactions.lose(c, taken.trial_id, taken.fence, "test"))
    again = claim(ledger)
    assert again.high_step == 1
    report(ledger, again, 1, **{"val/loss": 2.0, "time/epoch": 4.0, "late": 5.0})
    assert values(ledger) == {(1, "val/loss"): 1.0, (1, "time/epoch"): 3.0, (1, "late"): 5.0}
    with ledger.read() as connection:
        [fields] = connection.execute(
            select(tables.events.c.fields).where(tables.events.c.kind == "replay_differs")
        ).scalars()
    assert fields == {"step": 1, "metrics": {"val/loss": {"first": 1.0, "replay": 2.0}}}


def test_a_decision_is_taken_once_and_replayed(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    stop = Verdict("stop", reason="worse than most")
    assert report(ledger, taken, 3, decide=lambda _: stop, **{"val/loss": 1.0}).kind == "stop"
    ledger.transact(lambda c: transactions.lose(c, taken.trial_id, taken.fence, "test"))
    answer = report(ledger, claim(ledger), 3, decide=lambda _: CONTINUE, **{"val/loss": 1.0})
    assert answer == Verdict("stop", step=3, reason="worse than most")
    assert count(ledger, tables.decisions) == 1


def test_a_decision_that_raises_leaves_no_report_behind(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        report(ledger, taken, 1, decide=fail, **{"val/loss": 1.0})
    assert values(ledger) == {}


def test_after_the_fence_has_moved_on_nothing_is_written(ledger):
    ask(ledger, new_study(ledger), 0)
    old = claim(ledger)
    report(ledger, old, 1, **{"val/loss": 1.0})
    ledger.transact(lambda c: transactions.lose(c, old.trial_id, old.fence, "silent"))
    new = claim(ledger)
    before = [count(ledger, table) for table in tables.metadata.sorted_tables]
    assert isinstance(report(ledger, old, 2, **{"val/loss": 9.0}), Fenced)
    for body in (
        lambda c: claims.renew(c, old),
        lambda c: transactions.record(c, old, "e", {}, "uid"),
        lambda c: checkpoints.change(c, old, {"p": {"state": "deleted"}}),
        lambda c: transactions.finish(c, old, Outcome("complete"), [9.0]),
    ):
        with pytest.raises(Fenced):
            ledger.transact(body)
    assert [count(ledger, table) for table in tables.metadata.sorted_tables] == before
    ledger.transact(lambda c: transactions.finish(c, new, Outcome("complete", 1, 1), [1.0]))
    with ledger.read() as connection:
        [row] = queries.trial_rows(connection, 1)
    assert (row.state, row.values, row.fence) == ("complete", [1.0], new.fence)


def test_every_transaction_may_run_twice(ledger):
    """The outcome of a commit that broke is unknown, so it is retried."""
    study_id = new_study(ledger)
    ask(ledger, study_id, 0)
    taken = claim(ledger)
    told = transactions.TrialReport(taken, Report(1, {"val/loss": 1.0}, epoch=1), lambda _: CONTINUE)
    for body in (
        lambda c: transactions.commit(c, [told]),
        lambda c: transactions.record(c, taken, "e", {"x": math.nan}, "uid"),
        lambda c: transactions.finish(c, taken, Outcome("complete", 1, 1), [1.0]),
        lambda c: transactions.note(c, study_id, "n", {}, "uid2"),
    ):
        ledger.transact(body)
        ledger.transact(body)
    assert [count(ledger, t) for t in (tables.reports, tables.decisions, tables.events, tables.attempts)] == [
        1,
        1,
        2,
        1,
    ]


def test_a_group_of_lanes_commits_together_with_a_verdict_each(ledger):
    ask(ledger, new_study(ledger), 0, 1, 2)
    lanes = claim_all(ledger, 3)
    ledger.transact(lambda c: transactions.lose(c, lanes[1].trial_id, lanes[1].fence, "test"))
    reports = [
        transactions.TrialReport(
            lane, Report(1, {"val/loss": 1.0}, epoch=1), lambda _, i=i: Verdict("stop" if i else "continue")
        )
        for i, lane in enumerate(lanes)
    ]
    first, second, third = ledger.transact(lambda c: transactions.commit(c, reports))
    assert (first.kind, third.kind) == ("continue", "stop")
    assert isinstance(second, Fenced)
    assert count(ledger, tables.reports) == 2


def test_of_a_group_of_lanes_all_reports_are_committed_or_none(ledger):
    """As where its process dies in the middle of them."""
    ask(ledger, new_study(ledger), 0, 1, 2)
    lanes = claim_all(ledger, 3)

    def fails(_: sa.Connection) -> Verdict:
        raise ValueError("in the middle")

    for decide in (fails, lambda _: CONTINUE):
        deciding = [None, decide, None]
        told = [
            transactions.TrialReport(lane, Report(1, {"val/loss": 1.0}, epoch=1), d)
            for lane, d in zip(lanes, deciding, strict=True)
        ]
        with suppress(ValueError):
            ledger.transact(lambda c, told=told: transactions.commit(c, told))
        assert count(ledger, tables.reports) == (0 if decide is fails else 3)
    ledger.transact(lambda c: transactions.commit(c, told))
    assert count(ledger, tables.reports) == 3, "a retry of the same is harmless"


def test_a_lanes_decision_sees_the_reports_before_it_in_one_commit(ledger):
    """So that at a rung trials of one group are decided on as if one had come after the other."""
    ask(ledger, new_study(ledger), 0, 1, 2)
    seen = []

    def look(connection: sa.Connection) -> Verdict:
        seen.append(connection.execute(select(func.count()).select_from(tables.reports)).scalar_one())
        return CONTINUE

    lanes = [
        transactions.TrialReport(lane, Report(1, {"val/loss": 1.0}, epoch=1), look, strategy="x")
        for lane in claim_all(ledger, 3)
    ]
    ledger.transact(lambda c: transactions.commit(c, lanes))
    assert seen == [1, 2, 3]


def claim_alike(
    ledger: Ledger, n: int, group: str = "g", token: str = "", in_order: bool = False, alike=lambda config, _: True
) -> list[claims.Claim]:
    token = token or uuid.uuid4().hex
    return ledger.transact(lambda c: claims.claim_alike(c, ME.id, token, 1, group, n, alike, in_order))


def groups(ledger: Ledger) -> dict[int, str | None]:
    with ledger.read() as connection:
        return dict(map(tuple, connection.execute(select(tables.trials.c.number, tables.trials.c.group))))


@pytest.mark.parametrize(("in_order", "expected"), [(False, [0, 2, 4]), (True, [0])])
def test_of_what_waits_only_what_is_alike_joins_a_group(ledger, in_order, expected):
    ask(ledger, new_study(ledger), 0, 1, 2, 3, 4, 6)
    found = claim_alike(ledger, 3, in_order=in_order, alike=lambda config, _: config["a"] % 2 == 0)
    assert [one.number for one in found] == expected
    assert {n: group for n, group in groups(ledger).items() if group} == dict.fromkeys(expected, "g")
    assert [one.fence for one in found] == [1] * len(expected)
    assert [one.number for one in claim_all(ledger, 9)] == [n for n in (0, 1, 2, 3, 4, 6) if n not in expected]


def test_whoever_asks_again_about_a_claim_of_several_has_them(ledger):
    ask(ledger, new_study(ledger), *range(6))
    first = claim_alike(ledger, 2, token="t" * 32)
    assert claim_alike(ledger, 2, token="t" * 32) == first
    assert [one.number for one in first] == [0, 1] and count(ledger, tables.attempts) == 2
    assert [one.number for one in claim_alike(ledger, 2)] == [2, 3]


def test_a_trial_that_was_claimed_alone_joins_a_group_while_it_is_its_own(ledger):
    ask(ledger, new_study(ledger), 0, 1)
    first, second = claim_all(ledger, 2)
    ledger.transact(lambda c: transactions.lose(c, second.trial_id, second.fence, "test"))
    for one in (first, second):
        ledger.transact(lambda c, one=one: claims.join(c, one, "g"))
    assert groups(ledger) == {0: "g", 1: None}
    ledger.transact(lambda c: transactions.finish(c, first, Outcome("preempted"), None))
    again = claim(ledger)
    assert (again.number, groups(ledger)[0]) == (0, None), "who takes it anew says with whom it trains"


def test_a_trial_that_has_lost_two_workers_trains_alone(ledger):
    """It may be what they died of."""
    ask(ledger, new_study(ledger), 0, 1, 2)
    for lost in range(3):
        found = claim_alike(ledger, 3)
        assert [one.number for one in found] == ([0, 1, 2] if lost < 2 else [1, 2])
        assert not any(one.isolated for one in found)
        for one in found:
            if one.number == 0:
                ledger.transact(lambda c, one=one: transactions.lose(c, one.trial_id, one.fence, "killed"))
            else:
                ledger.transact(lambda c, one=one: transactions.finish(c, one, Outcome("preempted"), None))
    assert claim_alike(ledger, 3, in_order=True) == [], "and is passed over by none that is to wait for it"
    taken = claim(ledger)
    assert (taken.number, taken.isolated) == (0, True)


def test_what_a_restart_has_set_decides_who_is_alike(ledger):
    study_id = new_study(ledger)
    ask(ledger, study_id, 0, 1)
    source, restarted = claim_all(ledger, 2)
    ref = CheckpointRef(Path("step-1"), 1, 1, "0" * 64, 1)
    saved = transactions.TrialReport(source, Report(1, {"val/loss": 1.0}, epoch=1, checkpoint=ref))
    verdict = Verdict("restart_from", 1, checkpoint="0/step-1", params={"a": 7})
    told = transactions.TrialReport(restarted, Report(1, {"val/loss": 2.0}, epoch=1), lambda _: verdict)
    ledger.transact(lambda c: transactions.commit(c, [saved, told]))
    ledger.transact(lambda c: transactions.finish(c, restarted, Outcome("restarted", 1, 1), None))
    seen: list[tuple] = []
    found = claim_alike(ledger, 2, alike=lambda config, changes: not seen.append((config["a"], dict(changes))))
    assert seen == [(1, {"a": 7})] and [(one.number, one.fence) for one in found] == [(1, 2)]


def test_a_trial_of_a_group_is_claimed_once_however_many_groups_ask(ledger):
    ask(ledger, new_study(ledger), *range(24))
    taken: list[int] = []
    lock, start = threading.Lock(), threading.Barrier(4)

    def grab(group: str) -> None:
        start.wait()
        misses = 0
        while misses < 20:  # who asks while another one looks finds nothing, and comes again
            found = claim_alike(ledger, 2, group, alike=lambda config, _: True)
            misses = 0 if found else misses + 1
            with lock:
                taken.extend(one.number for one in found)

    threads = [threading.Thread(target=grab, args=(str(k),)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(taken) == list(range(24))


def test_a_trial_that_keeps_losing_its_worker_fails_in_the_end(ledger):
    ask(ledger, new_study(ledger), 0)
    for _ in range(transactions.MAX_LOSSES + 1):
        taken = claim(ledger)
        ledger.transact(lambda c, taken=taken: transactions.lose(c, taken.trial_id, taken.fence, "killed"))
    with ledger.read() as connection:
        [row] = queries.trial_rows(connection, 1)
    assert (row.state, row.outcome) == ("failed", "lost")
    assert row.error.endswith("last: killed")


def test_losses_count_in_a_row_and_not_against_what_gets_on(ledger):
    ask(ledger, new_study(ledger), 0)
    for step in range(3 * transactions.MAX_LOSSES):
        taken = claim(ledger)
        ref = CheckpointRef(Path(f"c{step}"), step, step, "s", 1)
        saved = transactions.TrialReport(taken, Report(step, {}, checkpoint=ref))
        ledger.transact(lambda c, saved=saved: transactions.commit(c, [saved]))
        ledger.transact(lambda c, t=taken: transactions.lose(c, t.trial_id, t.fence, "killed"))
    for _ in range(3 * transactions.MAX_LOSSES):
        taken = claim(ledger)
        ledger.transact(lambda c, t=taken: transactions.lose(c, t.trial_id, t.fence, "its driver died", counted=False))
    assert claim(ledger).number == 0


def test_a_trial_that_was_saved_and_left_in_good_order_has_lost_nobody(ledger):
    ask(ledger, new_study(ledger), 0)
    for step in range(3):
        for _ in range(transactions.MAX_LOSSES - 1):
            taken = claim(ledger)
            ledger.transact(lambda c, t=taken: transactions.lose(c, t.trial_id, t.fence, "killed"))
        taken = claim(ledger)
        ref = CheckpointRef(Path(f"c{step}"), step, step, "s", 1)
        saved = transactions.TrialReport(taken, Report(step, {}, checkpoint=ref))
        ledger.transact(lambda c, saved=saved: transactions.commit(c, [saved]))
        ledger.transact(lambda c, t=taken: transactions.finish(c, t, Outcome("preempted"), None))
    assert claim(ledger).number == 0


def test_a_paused_trial_is_counted_and_digested_but_never_claimed(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    with ledger.read() as connection:
        running = queries.digest(connection, queries.study_row(connection, "s"))
    ledger.transact(lambda c: transactions.finish(c, taken, Outcome("paused", 1, 1), None))
    assert claim_all(ledger) == []
    with ledger.read() as connection:
        assert queries.status(connection, "s").trials["paused"] == 1
        assert queries.digest(connection, queries.study_row(connection, "s")) != running


def test_the_digest_is_the_same_on_every_database_and_sees_every_part(ledger):
    def digest() -> str:
        with ledger.read() as connection:
            return queries.digest(connection, queries.study_row(connection, "s"))

    ask(ledger, new_study(ledger), 0)
    seen = [digest()]
    taken = claim(ledger)
    for step, metrics in ((1, {"val/loss": 0.1}), (1, {"train/loss": 1.0}), (2, {"val/B": 1.0, "val/a": math.nan})):
        report(ledger, taken, step, **metrics)
        seen.append(digest())
    report(ledger, taken, 2, **{"time/epoch": 1.0, "train/lr": 0.1, "system/cpu": 2.0})
    assert digest() == seen[-1], "only declared metrics enter"
    ledger.transact(lambda c: transactions.finish(c, taken, Outcome("complete", 2, 2), [1.0]))
    seen.append(digest())
    assert len(set(seen)) == len(seen)
    assert seen[-1] == "02910d6f94320b136a9d9b237617f3dcdc70d133baa0bcf58acc2fde1340310a", (
        "the same bytes on SQLite and PostgreSQL"
    )


def test_a_lease_is_one_owners_until_it_is_released(ledger):
    clock = SystemClock()
    held = acquire(ledger, "driver:1", "s", ME, clock, timeout=5)
    other = Process.current()
    with pytest.raises(Busy, match=rf"host {ME.host}, pid {ME.pid}, since 20\d\d-"):
        acquire(ledger, "driver:1", "s", other, clock, timeout=5)
    held.release()
    taken = acquire(ledger, "driver:1", "s", other, clock, timeout=5)
    assert taken.fence > held.fence
    with pytest.raises(Busy, match="taken over"):
        held.renew()


def test_a_process_is_surely_dead_only_where_its_pid_can_be_looked_up():
    machine, boot = ME.started.split("/")
    gone = 2**22 + 1  # above the kernel's largest pid
    assert is_dead(ME.host, gone, ME.started)
    assert is_dead(ME.host, os.getpid(), f"{machine}/an-earlier-boot:1")
    assert not is_dead(ME.host, gone, f"a-clone-of-the-same-name/{boot}")
    assert not is_dead("elsewhere", gone, ME.started)


@pytest.mark.usefixtures("process")
def test_the_lease_of_a_dead_process_is_taken_at_once(ledger):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(ME.host, child.pid, start_time(child.pid) or "")
    assert not is_dead(process.host, process.pid, process.started)
    acquire(ledger, "driver:1", "s", process, SystemClock(), timeout=60)
    child.kill()
    child.wait()
    child.stdin.close()
    clock = FakeClock()
    assert acquire(ledger, "driver:1", "s", ME, clock, timeout=60).fence == 2
    assert clock.now == 0


def test_a_silent_owner_elsewhere_loses_its_lease_by_our_own_clock(ledger):
    far = Process("elsewhere", 1, "then")
    acquire(ledger, "driver:1", "s", far, FakeClock(), timeout=30)
    clock = FakeClock(start=-1e6)  # whatever wall clocks say
    acquire(ledger, "driver:1", "s", ME, clock, timeout=30)
    assert 30 <= clock.now + 1e6 <= 32


def test_an_owner_elsewhere_that_renews_keeps_its_lease(ledger):
    far = acquire(ledger, "driver:1", "s", Process("elsewhere", 1, "then"), FakeClock(), timeout=30)

    class Renewing(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            far.renew()

    with pytest.raises(Busy, match="host elsewhere"):
        acquire(ledger, "driver:1", "s", ME, Renewing(), timeout=30)


def test_a_database_of_another_program_is_refused(ledger):
    with ledger.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'dc11669786a5'")  # as MLflow's are
    with pytest.raises(StorageError, match="is the database of another program: name one of its own by --storage"):
        Ledger(ledger.url)


def test_neither_mlflow_nor_optuna_makes_tables_beside_a_ledger(ledger, tmp_path):
    """Each keeps its version in a table of one name, and would find the ledger's there."""
    import optuna

    from hpo.interchange.optuna_storage import write
    from hpo.tracking.trackers import open_tracker

    before = sa.inspect(ledger.engine).get_table_names()
    for create in (True, False):
        with pytest.raises(Unreachable, match="another program's database: make one for MLflow, and name it by"):
            open_tracker(ledger.url, tmp_path / "artifacts", create=create)
    with pytest.raises(UserError, match="is the database of another program: name one of Optuna's, or a new file"):
        write(optuna.create_study(), ledger.url, "s")
    assert sa.inspect(ledger.engine).get_table_names() == before


def test_what_only_postgresql_refuses_is_made_the_same_on_both(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    odd = "a\0b\udc80"
    seen = "a\N{SYMBOL FOR NULL}b\\udc80"
    ledger.transact(lambda c: transactions.record(c, taken, "e", {odd: [odd]}, "uid"))
    report(ledger, taken, 1, decide=lambda _: Verdict("stop", reason=odd), **{"val/loss": 1.0})
    ledger.transact(
        lambda c: transactions.finish(c, taken, Outcome("user_error", 1, 1, error=odd, traceback=odd), None)
    )
    with ledger.read() as connection:
        [row] = queries.trial_rows(connection, 1)
        fields = connection.execute(select(tables.events.c.fields)).scalar_one()
        reason = connection.execute(select(tables.decisions.c.reason)).scalar_one()
    assert (row.error, row.traceback, fields, reason) == (seen, seen, {seen: [seen]}, seen)


def test_an_attempt_shows_its_step_while_it_runs(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    for step in (3, 7):
        report(ledger, taken, step, **{"val/loss": 1.0})
        with ledger.read() as connection:
            assert connection.execute(select(tables.attempts.c.step)).scalars().all() == [step]


def test_curves_read_each_ended_trial_once_whatever_gaps_there_are(ledger):
    study_id = new_study(ledger)
    ask(ledger, study_id, *range(6))
    taken = claim_all(ledger, 6)
    for one in taken:
        report(ledger, one, 1, **{"val/loss": float(one.number)})
    for one in taken[1:5]:  # 0 and 5 stay open
        ledger.transact(lambda c, one=one: transactions.finish(c, one, Outcome("complete", 1, 1), [1.0]))
    curves, read = Curves(study_id, [Objective("val/loss", "minimize")]), []
    curve = curves._curve
    curves._curve = lambda rows: read.append(rows) or curve(rows)
    for _ in range(3):
        with ledger.read() as connection:
            seen = curves.upto(connection, None)
    assert {number: curve for number, (_, curve) in seen.items()} == {n: [(1, float(n))] for n in range(6)}
    assert list(seen) == sorted(seen)
    assert len(read) == 6, "each once"
    ledger.transact(lambda c: transactions.finish(c, taken[0], Outcome("complete", 1, 1), [1.0]))
    with ledger.read() as connection:
        assert curves.upto(connection, 3).keys() == {0, 1, 2, 3}


def test_kept_curves_equal_those_read_anew_whatever_happens_between(ledger):
    """Reports that come to nothing among it, and looks from within them; two blocks of trials, and a part of one."""
    rng, study_id, loss = random.Random(3), new_study(ledger), [Objective("val/loss")]
    kept, spans = Curves(study_id, loss), [(1, 2), (2, 4), (4, math.inf)]
    asked, running, steps = 0, {}, {}

    def told(one: claims.Claim, curves: Curves, *, fails: bool) -> None:
        step = steps.get(one.trial_id, 0) + 1

        def decide(connection) -> Verdict:
            history = LedgerHistory(curves, connection, one.trial_id, one.number, step, None)
            fresh = LedgerHistory(Curves(study_id, loss), connection, one.trial_id, one.number, step, None)
            assert repr(history.value) == repr(fresh.value)
            for span in spans:
                assert history.order(*span) == fresh.order(*span)
                assert repr(sorted(history.at(span[0]).items())) == repr(sorted(fresh.at(span[0]).items()))
            if fails:
                raise ZeroDivisionError
            return CONTINUE

        with suppress(ZeroDivisionError):
            report(ledger, one, step, decide, **{"val/loss": rng.choice([rng.random(), 0.5, math.nan])})
            steps[one.trial_id] = step

    for _ in range(60):
        if asked < 100 and len(running) < 3:
            ask(ledger, study_id, *range(asked, asked := asked + 25))
        if len(running) < 3 and (taken := claim_all(ledger)):
            running[taken[0].number] = taken[0]
        one = running[rng.choice(sorted(running))]
        told(one, kept, fails=rng.random() < 0.3)
        if steps.get(one.trial_id) and rng.random() < 0.5:
            kind = rng.choice(["complete", "paused", "preempted"])
            end = Outcome(kind, steps[one.trial_id], steps[one.trial_id])
            ledger.transact(lambda c, one=one, end=end: transactions.finish(c, one, end, None))
            del running[one.number]
        if rng.random() < 0.3:
            ledger.transact(lambda c: driver_queries.thaw(c, study_id, rng.sample(range(max(asked, 1)), min(asked, 5))))
        last = rng.choice([None, rng.randrange(100)])
        with ledger.read() as connection:
            found, fresh = (repr(sorted(of.upto(connection, last).items())) for of in (kept, Curves(study_id, loss)))
        assert found == fresh
    assert {row.state for row in rows_of(ledger)} == {"complete", "paused", "waiting", "running"}


def rows_of(ledger: Ledger) -> list[dict]:
    with ledger.read() as connection:
        return queries.trial_rows(connection, 1)


def test_a_heartbeat_that_breaks_is_noticed(ledger, capsys):
    beats = iter([StorageError("away"), ZeroDivisionError("a bug")])

    def beat() -> None:
        raise next(beats)

    with Heartbeat("trial 3", beat, 0.01) as heartbeat:
        heartbeat._thread.join(5)
        with pytest.raises(HpoError, match=r"lease of trial 3 is not renewed any more \(ZeroDivisionError: a bug\)"):
            heartbeat.check()
    assert "could not be renewed: away" in capsys.readouterr().err


def test_tags_stand_once_and_are_seen_by_mirrors_when_they_change(ledger):
    study_id = new_study(ledger)
    ask(ledger, study_id, 0, 1)

    def put(number: int, **given: str | None) -> bool:
        return ledger.transact(lambda connection: tags.put(connection, study_id, number, given))

    def revisions() -> list[int]:
        with ledger.read() as connection:
            rows = [queries.study_row(connection, "s"), *queries.trial_rows(connection, study_id)]
        return [row.revision for row in rows]

    before = revisions()
    assert put(0, team="vision", by="ann") and not put(0, team="vision"), "the second time nothing changes"
    assert put(tags.STUDY, team="all") and revisions() == [before[0] + 1, before[1] + 1, before[2]]
    assert put(0, team="speech", by=None) and not put(0, by=None)
    with ledger.read() as connection:
        assert tags.given(connection, study_id) == {tags.STUDY: {"team": "all"}, 0: {"team": "speech"}}
        assert tags.every(connection, study_id, [0]) == {0: {"by": None, "team": "speech"}}, "for trackers to drop it"
    ledger.transact(lambda connection: removal.erase(connection, study_id))
    assert count(ledger, tables.tags) == 0


def test_an_attempt_that_lost_its_trial_tags_nothing(ledger):
    ask(ledger, new_study(ledger), 0)
    taken = claim(ledger)
    ledger.transact(lambda connection: transactions.tag(connection, taken, {"a": "1"}))
    ledger.transact(lambda connection: transactions.lose(connection, taken.trial_id, taken.fence, "x"))
    with pytest.raises(Fenced):
        ledger.transact(lambda connection: transactions.tag(connection, taken, {"a": "2"}))
    with ledger.read() as connection:
        assert tags.given(connection, 1) == {0: {"a": "1"}}
