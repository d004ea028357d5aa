"""What a run is: given, else as the study was begun, else declared."""

from __future__ import annotations

import pytest
from driven import driven
from places import ROOT

from hpo.driver.request import RunRequest
from hpo.driver.resolve import declare
from hpo.ledger import Ledger
from hpo.search.strategies.base import DEFAULT, STRATEGIES, make_strategy
from hpo.storage.home import Home

CURVES = (ROOT / "tests" / "harness" / "curves_study.py").read_text()
DECLARED = 'strategy={"name": "asha", "min_epochs": 1}'


@pytest.mark.parametrize("declared", ['"asha"', '{"name": "asha"}', '{"name": "median"}', None])
def test_asha_by_name_is_the_default(tmp_path, declared):
    study = tmp_path / "some_study.py"
    study.write_text(CURVES.replace(f"    {DECLARED},\n", f"    strategy={declared},\n" if declared else ""))
    home = Home(tmp_path / "home").create()
    spec = declare(RunRequest(home, str(study), strategy="asha"), Ledger(home.storage), workers=1).spec
    assert spec.strategy == make_strategy(DEFAULT).model_dump() == make_strategy("asha").model_dump()
    assert {
        name: make_strategy(name).model_dump().get("min_epochs") for name in ("asha", "halving", "asha-promote")
    } == {
        "asha": 4,
        "halving": 1,
        "asha-promote": 1,
    }


def test_a_strategy_named_again_keeps_the_options_it_was_begun_with(tmp_path):
    study, home = tmp_path / "some_study.py", Home(tmp_path / "home").create()
    study.write_text(CURVES)
    assert DECLARED in CURVES and "asha" in STRATEGIES
    ledger = Ledger(home.storage)
    driven(ledger, RunRequest(home, str(study), sampler="random"), trials=1)
    study.write_text(CURVES.replace(DECLARED, 'strategy="median"'))
    for named, expected in (("asha", 1), (None, 1), ("asha-promote", 1), ("halving", 1)):
        spec = declare(RunRequest(home, str(study), strategy=named), ledger, workers=1).spec
        assert spec.strategy["min_epochs"] == expected and spec.strategy["name"] == (named or "asha")
    ledger.close()
