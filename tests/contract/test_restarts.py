"""Pausing and restarting, from the strategy's verdict to the next attempt that trains on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driven import driven
from places import HARNESS
from sqlalchemy import select

from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.ledger.views import driver as driver_queries
from hpo.search.strategies.registry import STRATEGIES
from hpo.storage.home import Home

STUDY = str(HARNESS / "tiny_study.py")
PINNED = {"pause": 0.0, "model.hidden_size": 8, "train.optim.name": "adamw", "train.optim.lr": 0.05}


@pytest.fixture(autouse=True)
def strategies(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "pausing", "pausing:PauseAtOne")
    monkeypatch.setitem(STRATEGIES, "restarting", "pausing:RestartOne")


def drive(home: Home, strategy: str, trials: int, on_tick: Callable[[Ledger], None] = lambda _: None) -> Ledger:
    """Run the tiny study to its end in this process; its ledger."""
    ledger = Ledger(home.create().storage)
    flags = {"reference": STUDY, "window": 1, "sampler": "random", "strategy": strategy, "overrides": PINNED}
    ended = driven(ledger, request_of(home, **flags), tick=lambda _: on_tick(ledger), trials=trials)
    assert ended == ("tiny", "complete")
    return ledger


def digest(ledger: Ledger) -> str:
    return ledger.look(lambda c: queries.digest(c, queries.study_row(c, "tiny")))


def rows(ledger: Ledger, table, *columns: str) -> list[tuple]:
    chosen = [table.c[column] for column in columns]
    return [tuple(row) for row in ledger.look(lambda c: c.execute(select(*chosen).order_by(*table.primary_key)).all())]


def test_a_thawed_trial_is_the_trial_that_never_paused(tmp_path):
    seen: set[str] = set()

    def thaw(ledger: Ledger) -> None:
        states = rows(ledger, tables.trials, "number", "state")
        seen.update(state for _, state in states)
        ledger.transact(lambda c: driver_queries.thaw(c, 1, [number for number, state in states if state == "paused"]))

    paused = drive(Home(tmp_path / "paused"), "pausing", 2, thaw)
    straight = drive(Home(tmp_path / "straight"), "none", 2)
    assert "paused" in seen
    assert rows(paused, tables.attempts, "trial_id", "fence", "outcome", "from_step") == [
        (1, 1, "paused", 0),
        (1, 2, "complete", 4),
        (2, 1, "paused", 0),
        (2, 2, "complete", 4),
    ]
    assert rows(paused, tables.decisions, "verdict", "obeyed") == [("pause", 1)] * 2
    assert digest(paused) == digest(straight)


def test_a_restarted_trial_takes_the_others_checkpoint_and_parameters(tmp_path):
    ledger = drive(Home(tmp_path / "home"), "restarting", 2)
    assert rows(ledger, tables.trials, "number", "state", "parent", "generation") == [
        (0, "complete", None, 0),
        (1, "complete", 0, 1),
    ]
    attempts = rows(ledger, tables.attempts, "trial_id", "outcome", "from_step", "step")
    assert attempts == [(1, "complete", 0, 16), (2, "restarted", 0, 8), (2, "complete", 16, 24)]
    lr = {
        (trial, step): value
        for trial, step, key, value in rows(ledger, tables.reports, "trial_id", "step", "key", "value")
        if key == "train/lr"
    }
    assert [step for trial, step in lr if trial == 2] == [4, 8, 20, 24]
    assert lr[2, 20] < 0.01 < lr[2, 8], "it trains on with the restart's learning rate, and before with its own"
    [fields] = [fields for fields, kind in rows(ledger, tables.events, "fields", "kind") if kind == "restarted"]
    assert (fields["parent"], fields["step"]) == (0, 8)
    assert fields["params"] == {"train.optim.lr": 0.005, "train.num_epochs": 6}
