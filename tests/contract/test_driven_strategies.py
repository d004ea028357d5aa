"""What holds of every strategy as the driver uses it. None goes beyond a budget: never of trials, and of epochs by less
than one trial trains. And an interruption, wherever it comes, changes no decision."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from driven import driven
from places import HARNESS
from sqlalchemy import update

from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import studies
from hpo.search.promotion.base import PromotionStrategy
from hpo.search.strategies.registry import STRATEGIES, complete, make_strategy
from hpo.storage.home import Home

KEPT = HARNESS / "kept_study.py"
LENGTH = 9  # epochs of a trial

# Options with which a few trials of nine epochs meet rungs.
OPTIONS: dict[str, dict[str, Any]] = {
    "median": {"n_startup_trials": 1},
    "percentile": {"n_startup_trials": 1},
    "threshold": {"upper": 0.5, "n_warmup_epochs": 2},
    "patient": {"patience": 1, "strategy": None},
    "paired": {"parts": 9, "p_threshold": 0.3},
    "pasha": {"eta": 2},
    "freeze-thaw": {"min_epochs": 1, "eta": 2},
    "pbt": {"population": 3, "interval": 3},
    "pb2": {"population": 3, "interval": 3},
}

# A strategy that stops trials by whole curves, one that does so at rungs, and those that decide about waiting trials,
# whose drivers do most. What the others do is a function of the same history: tests/contract/test_strategies.py.
SAMPLED = ("asha", "asha-promote", "pasha", "freeze-thaw", "bohb", "pbt", "pb2")


def sampled(*names: str) -> list[Any]:
    """All strategies; only these are tried by default."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]


def written(home: Home, name: str, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The file of the study under a strategy with options, by default OPTIONS, and the strategy."""
    spec, sampler = (
        {"name": name, **(OPTIONS.get(name, {}) if options is None else options)},
        make_strategy(name).brings or "random",
    )
    file = home.create().root / "kept.py"
    file.write_text(KEPT.read_text().replace('sampler="random"', f"sampler={sampler!r}, strategy={spec!r}"))
    return str(file), spec


def drive(home: Home, name: str, seed: int = 0, workers: int = 1, **bound: int) -> list[int]:
    """Run the study under a strategy: what each trial has trained, by its number."""
    file, spec = written(home, name)
    with closing(Ledger(home.storage)) as ledger:
        study, state = driven(ledger, request_of(home, reference=file, seed=seed), workers=workers, **bound)
        declared = ledger.look(lambda c: queries.study_row(c, study)).spec
        assert declared.strategy == complete(spec, 9)
        rows = ledger.look(lambda c: queries.trial_rows(c, 1))
        assert state == ("complete" if any(row.state == "complete" for row in rows) else "stopped")
        return [row.epoch - row.from_epoch for row in rows]


def assert_epochs_kept(trained: list[int], epochs: int, name: str) -> None:
    """What docs/decisions/0004 says of a budget of epochs."""
    assert epochs <= sum(trained) < epochs + LENGTH, trained
    if not isinstance(make_strategy(name), PromotionStrategy):
        assert sum(trained[:-1]) < epochs, f"the last was asked for with nothing left: {trained}"


RUNGS = [name for name in STRATEGIES if {"min_epochs", "max_epochs"} <= make_strategy(name).model_dump().keys()]


def test_a_first_rung_that_no_trial_reaches_is_refused(tmp_path):
    def chosen(name: str, **spec: int) -> Any:
        home = Home(tmp_path)
        return declare(request_of(home, reference=written(home, name, spec)[0]), None, workers=1).spec.strategy[
            "max_epochs"
        ]

    assert len(RUNGS) > 4
    for name in RUNGS:
        default = make_strategy(name).model_dump()["min_epochs"]
        with pytest.raises(UserError, match=f"strategy '{name}': min_epochs={default + 5} is not below max_epochs=6"):
            chosen(name, min_epochs=default + 5, max_epochs=6)
        assert chosen(name, min_epochs=default + 5, max_epochs=default + 6) == default + 6, name
        assert chosen(name, max_epochs=1) == 1, f"the default's rungs are not what the user has written: {name}"


def test_it_is_refused_of_the_strategy_that_patient_asks_too(tmp_path):
    spec = {"strategy": {"name": "asha", "min_epochs": 3, "max_epochs": 3}}
    request = request_of(Home(tmp_path), reference=written(Home(tmp_path), "patient", spec)[0])
    with pytest.raises(UserError, match="strategy 'asha': min_epochs=3 is not below"):
        declare(request, None, workers=1)


def test_what_was_begun_with_no_rung_goes_on(tmp_path):
    home = Home(tmp_path)
    file, _ = written(home, "asha", {"min_epochs": 5, "max_epochs": 6})
    with closing(Ledger(home.storage)) as ledger:
        driven(ledger, request_of(home, reference=file), trials=1)
        with ledger.write() as connection:  # as it could be begun before such rungs were refused
            row = queries.study_row(connection, "kept")
            spec = row.spec.json | {"strategy": row.spec.strategy | {"max_epochs": 5}}
            connection.execute(update(studies).values(spec=spec))
        assert declare(request_of(home, name="kept"), ledger, workers=1).spec.strategy["max_epochs"] == 5


@pytest.mark.parametrize("name", sampled(*SAMPLED))
def test_no_strategy_exceeds_a_budget_of_trials(tmp_path, name):
    assert len(drive(Home(tmp_path), name, workers=2, trials=5)) == 5


@pytest.mark.parametrize("name", sampled(*SAMPLED))
def test_no_strategy_exceeds_a_budget_of_epochs_beyond_the_last_trial(tmp_path, name):
    trained = drive(Home(tmp_path), name, epochs=25)
    assert_epochs_kept(trained, 25, name)


@pytest.mark.parametrize(
    ("name", "seed", "workers", "epochs"), [("pasha", 0, 4, 14), ("asha-promote", 0, 4, 31), ("freeze-thaw", 0, 4, 31)]
)
def test_what_waits_at_lower_rungs_does_not_pass_other_workers(tmp_path, name, seed, workers, epochs):
    assert_epochs_kept(drive(Home(tmp_path), name, seed, workers, epochs=epochs), epochs, name)


def digest(home: Home, name: str, rounds: int | None = None) -> tuple[str, int]:
    """The digest of seven trials, and how many drivers it took where each is stopped after so many of its rounds."""
    request = request_of(home, reference=written(home, name)[0])
    left, state, drivers = [0], "", 0

    def tick(driver: Driver) -> None:
        left[0] -= 1
        if left[0] == 0:
            driver.request_stop()

    with closing(Ledger(home.storage)) as ledger:
        while state != "complete":
            left[0], drivers = rounds or -1, drivers + 1
            study, state = driven(ledger, request, tick=tick, trials=7)
            assert drivers < 100, "no driver gets on"
        return ledger.look(lambda c: queries.digest(c, queries.study_row(c, study))), drivers


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sampled("median", "asha", "asha-promote", "pasha", "freeze-thaw", "pbt"))
def test_drivers_stopped_again_and_again_decide_as_one(tmp_path, name, rounds):
    whole, _ = digest(Home(tmp_path / "whole"), name)
    found, drivers = digest(Home(tmp_path / "parts"), name, rounds)
    assert found == whole
    assert drivers > 3, "it was not interrupted"
