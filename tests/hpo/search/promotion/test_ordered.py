"""Ordered pausing in earnest: the same study for any number of workers, after interruptions, and in parts."""

from __future__ import annotations

from typing import Any

import pytest
from driven import stopping
from sqlalchemy import select
from tiny_runs import PROMOTE, TINY, digest, drive, rows

from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.ledger import Ledger
from hpo.ledger.database.tables import attempts, events, trials
from hpo.storage.home import Home
from hpo.workers.executors.local import Local

pytestmark = pytest.mark.whole

ORDERED: dict[str, Any] = PROMOTE | {"order": "ordered", "window": 8}


def of(strategy: str) -> dict[str, Any]:
    """The options of the tiny study under a strategy, which pauses its trials in order."""
    brings = strategy in ("bohb", "freeze-thaw")
    epochs = 6 if strategy == "freeze-thaw" else 4  # whose first rung is at epoch 4
    own = {"strategy": strategy, "overrides": ORDERED["overrides"] | {"train.num_epochs": epochs}}
    return {key: value for key, value in (ORDERED | own).items() if key != "sampler" or not brings}


def thaws(ledger: Ledger) -> list[tuple[int, int]]:
    """(trial, trials asked for before) of each step that let a paused trial go on."""
    query = select(trials.c.number, events.c.fields).join(trials).where(events.c.kind == "thawed")
    found = ledger.look(lambda connection: connection.execute(query.order_by(events.c.id)).all())
    return [(number, fields["asked"]) for number, fields in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Ledger:
    """One worker, never interrupted."""
    ledger, state = drive(Home(tmp_path_factory.mktemp("alone")), bound={"trials": 24}, **ORDERED)
    assert state == "complete"
    return ledger


def test_trials_wait_go_on_and_wait_still(alone):
    ends = rows(alone, trials.c.state, trials.c.epoch, trials.c["values"])
    assert len(ends) == 24 and {state for state, *_ in ends} == {"complete", "paused"}
    assert all(epoch in (1, 3) and values for state, epoch, values in ends if state == "paused")
    went_on = thaws(alone)
    assert len(went_on) > 5 and 0 < went_on[0][1] < 24, "trials go on while others are asked for"
    assert len(set(went_on)) < len(went_on) or len({number for number, _ in went_on}) < len(went_on)
    again = rows(alone, attempts.c.from_step, attempts.c.fence)
    assert any(fence > 1 and from_step > 0 for from_step, fence in again), "from its checkpoint"


def test_a_study_in_parts_is_the_study_at_once(tmp_path, alone):
    home = Home(tmp_path / "home")
    for count in (9, 17):
        ledger, state = drive(home, bound={"trials": count}, **ORDERED)
        assert state == "complete" and len(rows(ledger, trials.c.number)) == count
    ledger, state = drive(home, bound={"trials": 24}, **ORDERED)
    assert (state, digest(ledger), thaws(ledger)) == ("complete", digest(alone), thaws(alone))
    assert rows(ledger, trials.c.number, trials.c.told) == rows(alone, trials.c.number, trials.c.told)


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("workers", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_it_is_the_same_study_for_any_number_of_workers(tmp_path, alone, workers):
    ledger, state = drive(Home(tmp_path / "home"), Local(workers), workers=workers, bound={"trials": 24}, **ORDERED)
    assert (state, digest(ledger), thaws(ledger)) == ("complete", digest(alone), thaws(alone))
    assert len({worker for (worker,) in rows(ledger, attempts.c.worker_id)}) == workers


@pytest.mark.parametrize(
    "strategy",
    [
        "asha-promote",
        "freeze-thaw",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bohb", "hyperband-promote", "pasha")),
    ],
)
def test_interrupted_and_resumed_again_and_again_it_ends_the_same(tmp_path, strategy):
    flags = of(strategy)
    golden, _ = drive(Home(tmp_path / "golden"), **flags)
    assert thaws(golden)
    home, state, stops = Home(tmp_path / "home"), "interrupted", 0
    while state == "interrupted":
        ledger, state = drive(home, tick=stopping(4), **flags)
        stops += state == "interrupted"
    assert stops > 2
    assert (digest(ledger), thaws(ledger)) == (digest(golden), thaws(golden))


def test_order_and_window_stay_those_it_began_with(tmp_path):
    home = Home(tmp_path / "home").create()
    drive(home, bound={"trials": 2}, **ORDERED)
    ledger = Ledger(home.storage)
    for flags in ({}, {"strategy": "asha-promote"}):
        request = request_of(home, reference=TINY, **flags)
        spec = declare(request, ledger, workers=2).spec
        assert (spec.order, spec.window) == ("ordered", 8)
    ledger.close()
