"""Before other seeds confirm the best trial, `hpo best` and the report say how good it is expected to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from study_runs import hpo as command

import hpo
from hpo.analysis.report import data, page
from hpo.ledger import Ledger
from hpo.storage.home import Home

NOISY = """
import random

import hpo

@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, maximize="val/acc")
def noisy(trial):
    noise = random.Random(f"{trial.params.x} {trial.seed}")
    for epoch in range(1, 7):
        trial.report(epoch, {"val/acc": 0.9 - 0.01 * trial.params.x + noise.gauss(0, NOISE)})
"""
FLAGS = {"executor": "inline", "progress": False, "sampler": "random", "strategy": "none"}


@pytest.fixture
def ran(tmp_path, process):
    def run(noise: float, trials: int = 16) -> Home:
        (tmp_path / "noisy.py").write_text(NOISY.replace("NOISE", str(noise)))
        hpo.run(tmp_path / "noisy.py", trials=trials, home=tmp_path / "home", **FLAGS)
        return Home.at(tmp_path / "home")

    return run


def best(home: Home) -> dict:
    return json.loads(command("best", "--json", home=home).stdout)


def test_the_best_is_expected_to_be_worse_until_seeds_confirm_it(ran):
    home = ran(0.05)
    trial = best(home)
    on_new = trial["expected"]
    assert on_new["source"] == "epochs" and on_new["noise"] == pytest.approx(0.05, rel=0.4)
    assert on_new["value"] < trial["value"] - 0.5 * on_new["noise"], "higher is better, and 16 values are noise"
    assert on_new["runner_up"]["number"] != trial["number"] and on_new["runner_up"]["behind"] >= 0
    value = f"about {on_new['value']:.4g} ± {on_new['noise']:.2g} is expected on new data"
    line = f"{value}, by the scatter of the last epochs"
    doubt = f"trial {trial['number']} may be no better than trial {on_new['runner_up']['number']}"
    text = command("best", home=home).stdout
    assert line in text and doubt in text
    ledger = Ledger(home.storage, create=False)
    shown = page.file_page([data.read(ledger, home, "noisy")])
    ledger.close()
    assert line[1:] in shown and doubt[1:] in shown
    flags = "--top", "2", "--seeds", "2", "--executor", "inline"
    assert command("confirm", "--study", "noisy", *flags, home=home).exit_code == 0
    assert best(home)["expected"] is None, "its mean under other seeds is what is expected"


DEFAULT = '''
import random

import hpo

@hpo.study(space={"x": hpo.Choice([0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8])}, minimize="loss", sampler="grid")
def beside(trial):
    """The default is x = 0.5, which is worse than the best, x = BEST, by GAP."""
    noise = random.Random(f"{trial.params.x} {trial.seed}")
    loss = GAP * (trial.params.x != BEST)
    for epoch in range(1, 9):
        trial.report(epoch, {"loss": loss + noise.gauss(0, 0.01)})
'''


@pytest.mark.parametrize(("gap", "winner"), [(0.5, 0.3), (0.0, 0.3), (0.5, 0.5)])
def test_the_best_is_told_from_a_default_that_was_tried(gap, winner, tmp_path, process):
    (tmp_path / "beside.py").write_text(DEFAULT.replace("GAP", str(gap)).replace("BEST", str(winner)))
    grid: dict[str, Any] = FLAGS | {"sampler": "grid"}
    hpo.run(tmp_path / "beside.py", trials=8, home=tmp_path / "home", **grid)
    home = Home.at(tmp_path / "home")
    trial, text = best(home), command("best", home=home).stdout
    default, number = trial["expected"]["default"], trial["number"]
    tried = hpo.open("beside", home=home.root).trial(default["number"])
    assert tried["params"] == {"x": 0.5}
    name = f"the default configuration, trial {default['number']}"
    if trial["params"]["x"] == 0.5:
        assert f"trial {number} is the default configuration: the search has found nothing better" in text
    elif gap:
        assert default["seeds"] == 0 and default["behind"] == pytest.approx(0.5, abs=0.05)
        assert f"trial {number} is better than {name}, by more than their noise explains" in text
    else:
        assert default["seeds"] != 0 and f"trial {number} may be no better than {name}, which is expected " in text


def test_trials_that_do_not_scatter_and_few_trials_have_no_expectation(ran):
    assert best(ran(0.0))["expected"] is None


def test_too_few_curves_show_no_scatter(ran):
    assert best(ran(0.05, trials=3))["expected"] is None
