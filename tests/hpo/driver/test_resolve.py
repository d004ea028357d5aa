"""What a run is: given, else as the study was begun, else declared."""

from __future__ import annotations

from typing import Any

import pytest
from driven import driven
from places import ROOT

from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import DriftError
from hpo.ledger import Ledger
from hpo.search.strategies.registry import DEFAULT, STRATEGIES, complete
from hpo.storage.home import Home

CURVES = (ROOT / "tests" / "harness" / "curves_study.py").read_text()
DECLARED = 'strategy={"name": "asha", "min_epochs": 1}'


@pytest.mark.parametrize("declared", ['"asha"', '{"name": "asha"}', '{"name": "median"}', None])
def test_asha_by_name_is_the_default(tmp_path, declared):
    study = tmp_path / "some_study.py"
    study.write_text(CURVES.replace(f"    {DECLARED},\n", f"    strategy={declared},\n" if declared else ""))
    home = Home(tmp_path / "home").create()
    spec = declare(request_of(home, str(study), strategy="asha"), Ledger(home.storage), workers=1).spec
    assert spec.strategy == complete(DEFAULT, 9) == {"name": "asha", "min_epochs": 3, "eta": 3, "max_epochs": None}
    assert {name: complete({"name": name}, 9).get("min_epochs") for name in ("asha", "halving", "asha-promote")} == {
        "asha": 3,
        "halving": 1,
        "asha-promote": 1,
    }


@pytest.mark.parametrize(
    ("overrides", "declared", "first"),
    [
        ({"train.num_epochs": 4}, None, 4),  # which stops none of four
        ({"train.num_epochs": 5}, None, 2),
        ({"train.num_epochs": 6}, None, 2),
        ({"train.num_epochs": 7}, None, 3),
        ({"train.num_epochs": 9}, None, 3),
        ({"train.num_epochs": 10}, None, 4),
        ({"train.num_epochs": 90}, None, 4),
        ({"train.num_epochs": 9}, '{"name": "asha", "eta": 2}', 3),
        ({"train.num_epochs": 9}, '{"name": "asha", "min_epochs": 4}', 4),
        ({"train.num_epochs": 9, "train.folds": 8}, '"asha"', 4),
    ],
)
def test_the_first_rung_goes_by_the_epochs_of_a_trial(tmp_path, overrides, declared, first):
    study, home = tmp_path / "some_study.py", Home(tmp_path / "home").create()
    text = CURVES.replace("    num_epochs: int = 9\n", "    num_epochs: int = 9\n    folds: int = 1\n")
    study.write_text(text.replace(f"    {DECLARED},\n", f"    strategy={declared},\n" if declared else ""))
    spec = declare(request_of(home, str(study), overrides=overrides), Ledger(home.storage), workers=1).spec
    assert spec.strategy["min_epochs"] == first
    assert complete(spec.strategy, 7) == spec.strategy, "it is settled once"


def test_folds_are_paired_unless_a_strategy_is_named(tmp_path):
    study, home = tmp_path / "some_study.py", Home(tmp_path / "home").create()
    text = CURVES.replace("    num_epochs: int = 9\n", "    num_epochs: int = 9\n    folds: int = 1\n")
    study.write_text(text.replace(f"    {DECLARED},\n", ""))
    ledger = Ledger(home.storage)
    for strategy, expected in ((None, "paired"), ("asha", "asha"), ("none", "none")):
        request = request_of(home, str(study), overrides={"train.folds": 8}, strategy=strategy)
        spec = declare(request, ledger, workers=1).spec
        assert spec.strategy["name"] == expected and spec.strategy.get("parts", 8) == 8
    ledger.close()


def test_a_strategy_named_again_keeps_the_options_it_was_begun_with(tmp_path):
    study, home = tmp_path / "some_study.py", Home(tmp_path / "home").create()
    study.write_text(CURVES)
    assert DECLARED in CURVES and "asha" in STRATEGIES
    ledger = Ledger(home.storage)
    driven(ledger, request_of(home, str(study), sampler="random"), trials=1)
    study.write_text(CURVES.replace(DECLARED, 'strategy="median"'))
    for named, expected in (("asha", 1), (None, 1), ("asha-promote", 1), ("halving", 1)):
        spec = declare(request_of(home, str(study), strategy=named), ledger, workers=1).spec
        assert spec.strategy["min_epochs"] == expected and spec.strategy["name"] == (named or "asha")
    ledger.close()


@pytest.mark.parametrize(
    ("option", "value", "declared"),
    [
        (
            "strategy",
            {"name": "asha", "min_epochs": 2, "eta": 2},
            'strategy={"name": "asha", "min_epochs": 2, "eta": 2}',
        ),
        ("strategy", {"name": "median"}, 'strategy={"name": "median"}'),
        ("sampler", {"name": "tpe", "n_startup_trials": 3}, 'sampler={"name": "tpe", "n_startup_trials": 3}'),
        ("sampler", {"name": "grid"}, 'sampler={"name": "grid"}'),
    ],
)
def test_options_that_are_given_are_those_of_a_declaration(tmp_path, option, value, declared):
    study, home = tmp_path / "some_study.py", Home(tmp_path / "home")
    study.write_text(CURVES.replace(DECLARED, declared))
    expected = declare(request_of(home, str(study)), None, workers=1).spec
    study.write_text(CURVES.replace(f"    {DECLARED},\n", ""))
    assert declare(request_of(home, str(study), **{option: value}), None, workers=1).spec == expected


@pytest.mark.parametrize(
    ("option", "begun", "other"),
    [
        ("strategy", {"name": "asha", "min_epochs": 2}, {"name": "asha", "min_epochs": 3}),
        ("sampler", {"name": "tpe", "n_startup_trials": 3}, {"name": "tpe", "n_startup_trials": 4}),
    ],
)
def test_options_that_were_given_are_kept_and_compared(tmp_path, option, begun, other):
    study, home = tmp_path / "some_study.py", Home(tmp_path / "home").create()
    study.write_text(CURVES)
    ledger = Ledger(home.storage)
    asked: dict[str, Any] = {"sampler": "random", option: begun}
    driven(ledger, request_of(home, str(study), **asked), trials=1)

    def now(**given):
        return declare(request_of(home, str(study), **given), ledger, workers=1)

    first = now()
    for again in (now(**{option: begun}), now(**{option: begun["name"]})):
        assert again.spec == first.spec, "given again, or by name alone, they are the same"
    with pytest.raises(DriftError, match=rf"and {option} changed"):
        driven(ledger, request_of(home, str(study), **{option: other}), trials=2)
    ledger.close()
