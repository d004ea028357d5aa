"""Before other seeds confirm the best trial, `hpo best` and the report say how good it is expected to be."""

from __future__ import annotations

import json

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
    doubt = f"trial {trial['number']} cannot be told from trial {on_new['runner_up']['number']}"
    text = command("best", home=home).stdout
    assert line in text and doubt in text
    ledger = Ledger(home.storage, create=False)
    shown = page.file_page([data.read(ledger, home, "noisy")])
    ledger.close()
    assert line[1:] in shown and doubt[1:] in shown
    flags = "--top", "2", "--seeds", "2", "--executor", "inline"
    assert command("confirm", "--study", "noisy", *flags, home=home).exit_code == 0
    assert best(home)["expected"] is None, "its mean under other seeds is what is expected"


def test_trials_that_do_not_scatter_and_few_trials_have_no_expectation(ran):
    assert best(ran(0.0))["expected"] is None


def test_too_few_curves_show_no_scatter(ran):
    assert best(ran(0.05, trials=3))["expected"] is None
