"""Promotion in earnest: real trials pause with their checkpoints and go on, here, elsewhere and after a restart."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from driven import stopping, turn
from sqlalchemy import select, update
from tiny_runs import FULL, PROMOTE, TINY, digest, drive, rows

from hpo.analysis.results.trial import describe, detail
from hpo.driver import proposer
from hpo.driver.loop import Driver
from hpo.driver.request import DriverOptions, request_of
from hpo.driver.resolve import declare
from hpo.ledger import Ledger, claims, transactions, worker_rows
from hpo.ledger.database.tables import attempts, decisions, reports, studies, trials
from hpo.ledger.process_id import Process
from hpo.ledger.views import driver as driver_queries
from hpo.storage.home import Home
from hpo.workers.executors.inline import Inline
from hpo.workers.executors.local import Local
from trainer.report import Outcome, Report, Verdict

pytestmark = pytest.mark.whole

THAW = {"strategy": "freeze-thaw", "overrides": FULL | {"train.num_epochs": 6}}  # its first rung is at epoch 4


def curves(ledger: Ledger) -> dict[int, list[tuple[int, float]]]:
    """number -> (step, val/loss)."""
    query = (
        select(trials.c.number, reports.c.step, reports.c.value)
        .join(reports)
        .where(reports.c.key == "val/loss", reports.c.epoch.is_not(None))
        .order_by(trials.c.number, reports.c.step)
    )
    found: dict[int, list] = {}
    for number, step, value in ledger.look(lambda c: c.execute(query).all()):
        found.setdefault(number, []).append((step, value))
    return found


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Ledger:
    """One worker, never interrupted."""
    ledger, state = drive(Home(tmp_path_factory.mktemp("golden")), **PROMOTE)
    assert state == "complete"
    return ledger


def test_trials_pause_go_on_and_end(golden):
    states = [state for (state,) in rows(golden, trials.c.state)]
    assert len(states) == 14 and set(states) == {"complete", "pruned"}
    assert 0 < states.count("complete") < 5
    outcomes = [outcome for (outcome,) in rows(golden, attempts.c.outcome)]
    assert outcomes.count("paused") >= 10 and set(outcomes) <= {"paused", "complete", "pruned"}
    went_on = rows(golden, attempts.c.from_step, attempts.c.fence)
    assert any(fence > 1 and from_step > 0 for from_step, fence in went_on), "from its checkpoint, not from the start"
    assert len(rows(golden, decisions.c.trial_id)) == len(set(rows(golden, decisions.c.trial_id, decisions.c.step)))
    told = sorted(place for (place,) in rows(golden, trials.c.told))
    assert told == list(range(14)), "every trial is told of once, as ended"


def test_a_trial_that_waited_to_the_end_shows_why(golden):
    [number, *_] = [number for number, state in rows(golden, trials.c.number, trials.c.state) if state == "pruned"]
    home = Home(Path(golden.url.removeprefix("sqlite:///")).parent)
    text = golden.look(lambda c: describe(detail(c, home, "tiny", number), ""))
    assert re.search(r"\ndecisions\n  step 4 +pause +by asha-promote +rank \d of \d at rung 0 \(epoch 1\)", text)


def test_what_went_on_is_what_never_paused(tmp_path):
    """Under a sampler that does not learn, every curve is the beginning of the same trial's whole one."""
    few = {"sampler": "random", "overrides": PROMOTE["overrides"], "bound": {"trials": 9}}
    promoted, _ = drive(Home(tmp_path / "promoted"), strategy="asha-promote", **few)
    whole, _ = drive(Home(tmp_path / "whole"), strategy="none", **few)
    parts, full = curves(promoted), curves(whole)
    assert all(full[number][: len(curve)] == curve for number, curve in parts.items())
    assert {len(curve) for curve in parts.values()} == {1, 3, 4}
    assert sum(map(len, parts.values())) < sum(map(len, full.values())) / 2


@pytest.mark.parametrize(
    ("flags", "sampler"),
    [
        pytest.param(PROMOTE, "tpe", id="asha-promote"),
        pytest.param({"strategy": "bohb", "overrides": FULL}, "bohb", id="bohb"),
        *(
            pytest.param({"sampler": sampler, **flags}, sampler, id=flags["strategy"], marks=pytest.mark.slow)
            for flags, sampler in (
                (THAW, "freeze-thaw"),
                ({"strategy": "pasha", "overrides": FULL}, "tpe"),
                ({"strategy": "hyperband-promote", "overrides": FULL}, "tpe"),
            )
        ),
    ],
)
def test_one_worker_interrupted_and_resumed_again_and_again_ends_the_same(tmp_path, golden, flags, sampler):
    if flags is not PROMOTE:
        golden, _ = drive(Home(tmp_path / "golden"), **flags)
        assert "paused" in [outcome for (outcome,) in rows(golden, attempts.c.outcome)]
        assert rows(golden, studies.c.spec["sampler"].as_string()) == [(sampler,)]
    home, state, stops = Home(tmp_path / "home"), "interrupted", 0
    while state == "interrupted":
        ledger, state = drive(home, tick=stopping(4), **flags)
        stops += state == "interrupted"
    assert stops > 3
    assert digest(ledger) == digest(golden)


# A curve without training; where x is below `odd_below` it is `odd` from end to end.
ODD = """
from pydantic import BaseModel, ConfigDict
from hpo import Float, Objective, Study
from trainer.report import ENDS, Outcome

class Train(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_epochs: int = 6

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: Train = Train()
    x: float = 0.5
    odd: str = "nan"
    odd_below: float = 0.6

class Odd:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        c = self.config
        for epoch in range(1, c.train.num_epochs + 1):
            loss = float(c.odd) if c.x < c.odd_below else c.x + 1 / epoch
            verdict = reporter.report(epoch, {"val/loss": loss}, epoch=epoch).kind
            if verdict in ENDS:
                return Outcome(ENDS[verdict], epoch, epoch)
        return Outcome("complete", c.train.num_epochs, c.train.num_epochs)

STUDY = Study("odd", Config(), Odd, {"x": Float(0.0, 1.0)}, [Objective("val/loss")], strategy=STRATEGY)
"""


@pytest.mark.parametrize(
    ("strategy", "odd", "below", "stopped"),
    [("freeze-thaw", "inf", 2.0, 12), ("asha", "inf", 2.0, 12), ("asha", "-inf", 0.6, None)],
)
def test_an_infinite_objective_ends_a_study_as_nan_does(tmp_path, strategy, odd, below, stopped):
    """At the first rung, epoch 4, such a trial stops, and none is ahead of a finite one for it."""
    (tmp_path / "odd.py").write_text(ODD.replace("STRATEGY", repr({"name": strategy, "min_epochs": 4})))
    flags = {"reference": str(tmp_path / "odd.py")}
    flags |= {} if strategy == "freeze-thaw" else {"sampler": "random"}
    found = {}
    for value in ("nan", odd):
        overrides = {"odd": value, "odd_below": below}
        ledger, state = drive(Home(tmp_path / value), bound={"trials": 12}, overrides=overrides, **flags)
        ends = rows(ledger, trials.c.number, trials.c.state, trials.c.epoch)
        found[value] = state, ends, rows(ledger, decisions.c.trial_id, decisions.c.step, decisions.c.reason)
    assert found[odd] == found["nan"]
    ends = [(state, epoch) for _, state, epoch in found[odd][1]]
    if stopped:
        assert ends == [("infeasible", 4)] * stopped
    else:
        assert {("infeasible", 4), ("complete", 6)} == set(ends), "and the best third of the finite ones goes on"


@pytest.mark.usefixtures("process")
def test_two_workers_share_the_rungs(tmp_path):
    ledger, state = drive(Home(tmp_path / "home"), Local(2), workers=2, **PROMOTE)
    assert state == "complete"
    assert {state for (state,) in rows(ledger, trials.c.state)} == {"complete", "pruned"}
    met = rows(ledger, decisions.c.trial_id, decisions.c.step)
    assert len(met) == len(set(met))
    moved = rows(ledger, attempts.c.trial_id, attempts.c.worker_id, attempts.c.from_step)
    assert len({worker for _, worker, _ in moved}) == 2
    assert sorted(place for (place,) in rows(ledger, trials.c.told)) == list(range(14))


def test_a_budget_of_epochs_counts_what_was_trained(tmp_path):
    ledger, state = drive(Home(tmp_path / "home"), bound={"epochs": 12}, **PROMOTE)
    trained = [epoch for (epoch,) in rows(ledger, trials.c.epoch)]
    assert state == "complete"
    assert 12 <= sum(trained) < 12 + 4
    assert len(trained) > 12 / 4, "what waits at a rung is not counted in full"
    assert "complete" in [state for (state,) in rows(ledger, trials.c.state)], "its winner is trained in full"


def test_more_trials_later_leave_alone_what_has_ended(tmp_path):
    home = Home(tmp_path / "home")
    ledger, _ = drive(home, bound={"trials": 5}, **PROMOTE)
    before = rows(ledger, trials.c.number, trials.c.state, trials.c.epoch)
    assert "pruned" in [state for _, state, _ in before]
    ledger, state = drive(home, bound={"trials": 9}, **PROMOTE)
    after = rows(ledger, trials.c.number, trials.c.state, trials.c.epoch)
    assert (state, after[:5], len(after)) == ("complete", before, 9)


def interrupted_with_paused_trials(home: Home) -> Ledger:
    def stop(driver: Driver) -> None:
        if len(driver.study.frontier.paused) >= 2:
            driver.request_stop()

    ledger, state = drive(home, tick=stop, **PROMOTE)
    assert state == "interrupted"
    assert [state for (state,) in rows(ledger, trials.c.state)].count("paused") >= 2
    return ledger


def test_failures_that_end_a_study_keep_what_waits(tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    ledger = interrupted_with_paused_trials(home)
    waiting = {number for number, state in rows(ledger, trials.c.number, trials.c.state) if state == "paused"}
    monkeypatch.setenv("TINY_FAIL", "1")
    ledger, state = drive(home, **PROMOTE)
    assert state == "stopped"
    kept = {number for number, state in rows(ledger, trials.c.number, trials.c.state) if state == "paused"}
    assert kept and kept <= waiting
    monkeypatch.delenv("TINY_FAIL")
    ledger, state = drive(home, **PROMOTE)
    assert state == "complete"
    assert {state for (state,) in rows(ledger, trials.c.state)} == {"complete", "pruned", "failed"}


def test_what_waits_goes_on_under_a_strategy_that_lets_nothing_wait(tmp_path):
    home = Home(tmp_path / "home")
    interrupted_with_paused_trials(home)
    ledger, state = drive(home, bound={"trials": 4}, allow_drift=True, **(PROMOTE | {"strategy": "none"}))
    assert state == "complete"
    assert {state for (state,) in rows(ledger, trials.c.state)} == {"complete"}


def test_what_ray_tune_has_paused_goes_on_elsewhere(tmp_path):
    """Under Tune the strategy was none before, too."""
    home = Home(tmp_path / "home")
    ledger = interrupted_with_paused_trials(home)
    [spec] = [spec for (spec,) in rows(ledger, studies.c.spec)]
    ledger.transact(lambda c: c.execute(update(studies).values(spec=spec | {"strategy": {"name": "none"}})))
    ledger, state = drive(home, bound={"trials": 4}, allow_drift=True, **(PROMOTE | {"strategy": "none"}))
    assert state == "complete"
    assert {state for (state,) in rows(ledger, trials.c.state)} == {"complete"}


def test_a_sampler_made_anew_knows_of_open_trials_what_the_live_one_does(tmp_path):
    """Of a trial that went on its curve up to the pause, of one that never paused nothing."""
    home, strategy = Home(tmp_path / "home").create(), {"name": "asha-promote", "min_epochs": 1, "eta": 2}
    ledger, me = Ledger(home.storage), Process.current()
    asked = request_of(home, reference=TINY, sampler="freeze-thaw", strategy="asha-promote", overrides=FULL)
    resolved = declare(asked, ledger, workers=2)
    resolved = replace(resolved, spec=resolved.spec.model_copy(update={"strategy": strategy}))
    driver = Driver(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=9), Inline())
    ledger.transact(lambda c: worker_rows.register(c, me, "test"))
    driver.acquire()

    def take():
        turn(driver)
        return ledger.transact(lambda c: claims.claim(c, me.id, uuid.uuid4().hex, [1]))[0]

    def report(taken, epoch, *verdict):
        said = {"decide": lambda _: Verdict(*verdict), "strategy": "asha-promote"} if verdict else {}
        last = Report(epoch, {"val/loss": 1 / epoch + taken.number}, epoch=epoch)
        ledger.transact(lambda c: transactions.commit(c, [transactions.TrialReport(taken, last, **said)]))
        if verdict:
            ledger.transact(lambda c: transactions.finish(c, taken, Outcome("paused", epoch, epoch), None))

    first, second = take(), take()
    report(first, 1, "pause"), report(second, 1, "pause")
    again, never = take(), take()
    report(again, 2), report(again, 3), report(never, 1)
    turn(driver)
    live = driver.study.frontier.proposer._sampler
    found = {row.number: row for row in ledger.look(lambda c: driver_queries.all_rows(c, 1))}
    made = proposer.LedgerProposer(ledger, resolved, driver.study.curves, found, [], 0)._sampler
    assert {again.number, never.number} == {0, 2}
    assert live._sampler._curves == made._sampler._curves == {0: [(1, 1.0)], 1: [(1, 2.0)], 2: []}
    driver.release()
    ledger.close()
