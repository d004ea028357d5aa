"""Densities that the learning rate follows by default: in which studies, and what the row keeps."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from inspect import signature

import pytest
from driven import driven

from hpo import Float
from hpo.declaration.bundled import BUNDLED
from hpo.declaration.default_densities import notice, settle
from hpo.declaration.references import load
from hpo.declaration.spec import StudySpec
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import DriftError
from hpo.ledger import Ledger, queries
from hpo.space.space import Space
from hpo.storage.home import Home

LR, PLAIN = "train.optim.lr", '{"prior": null}'
STUDY = """
import json, math, os
from pydantic import BaseModel, ConfigDict
from hpo import Float, Objective, Study
from trainer.config import OptimConfig, TrainConfig
from trainer.report import Outcome

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: TrainConfig = TrainConfig(num_epochs=1, optim=OptimConfig(name="sgd", lr=0.01))

class Curves:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        reporter.report(1, {"val/loss": (math.log10(self.config.train.optim.lr) + 2) ** 2}, epoch=1)
        return Outcome("complete", 1, 1)

GUIDE = json.loads(os.environ.get("GUIDE", "{}"))
SPACE = {"train.optim.lr": Float(1e-4, 1.0, log=True, **GUIDE)}
STUDY = Study("rated", Config(), Curves, SPACE, [Objective("val/loss", "minimize")])
"""


def follows(optimizer="sgd", sampler="auto", dimension=None, pinned=(), **more):
    """Returns the densities of the bundled study `mlp`, its learning rate declared as `dimension`."""
    study = load("mlp")
    space = Space({**study.space.dimensions, LR: dimension or study.space.dimensions[LR]})
    study = replace(study, space=space).configure({"train.optim.name": optimizer, **dict(pinned)}, ())
    return settle(study, spec(sampler, **more), None)


def spec(sampler="auto", **more):
    rest = {"strategy": {"name": "none"}, "window": 4, "objectives": [], "metrics": []}
    return StudySpec(reference="mlp", name="mlp", sampler=sampler, **rest, **more)


def test_a_learning_rate_of_sgd_follows_a_density():
    assert follows("sgd") == {LR: "lr/sgd"}
    assert [follows(other) for other in ("adam", "adamw", "lion")] == [{}, {}, {}]
    assert settle(load("mlp"), spec(), None) == {}, "its optimizers do not share one"


def test_what_the_declaration_says_comes_first():
    own = Float(1e-4, 1e-1, log=True)
    assert follows(dimension=own) == {LR: "lr/sgd"}
    assert follows(dimension=Float(1e-4, 1e-1, log=True, prior=None)) == {}
    assert follows(dimension=Float(1e-4, 1e-1, log=True, prior=0.01)) == {}
    assert follows(dimension=Float(1e-4, 1e-1, log=True, like="lr/adam")) == {}
    assert follows(dimension=Float(1e-6, 2e-3, log=True)) == {}, "the range is for other models"
    assert follows(pinned={LR: 0.01}) == {}, "it is not searched"


def test_a_dimension_shows_no_prior_where_it_names_none():
    assert repr(signature(Float).parameters["prior"].default) == "BY_DEFAULT" and "prior=None" in repr(Float(0, 1))
    assert Float(0, 1) == Float(0, 1, prior=None)
    assert Float(0, 1).undecided and Float(0, 1).set_relative(True).undecided
    assert not Float(0, 1, prior=None).set_relative(True).undecided


def test_configurations_that_are_listed_are_not_drawn():
    assert follows(listed=[{"label": "one", "params": {LR: 0.01}}]) == {}


@pytest.mark.parametrize("sampler", ["random", "grid", "qmc", "cmaes"])
def test_samplers_to_compare_with_stay_as_they_are(sampler):
    assert follows(sampler=sampler) == {}


def test_bundled_studies_follow_none_by_default():
    """The results that golden files hold change where this does."""
    for study in map(load, BUNDLED):
        assert settle(study, spec(), None) == settle(study.upto(1), spec(), None) == {}, study.name


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home").create()


@pytest.fixture
def rated(tmp_path, monkeypatch):
    """Returns the reference of a study whose learning rate is declared with these further arguments, in JSON."""

    def declared(guide="{}"):
        monkeypatch.setenv("GUIDE", guide)
        for name in [name for name in sys.modules if name.startswith("hpo_study_") and name.endswith("_rated")]:
            del sys.modules[name]  # it reads the variable as it is loaded
        file = tmp_path / "rated.py"
        file.write_text(STUDY)
        return str(file)

    return declared


def drive(home, reference, trials, name="rated"):
    """Runs a study without its mirror; returns its specification, its learning rates and its digest."""
    with closing(Ledger(home.storage)) as ledger:
        request = request_of(home, reference=reference, name=name, learn_from="none")
        assert driven(ledger, request, trials=trials)[1] == "complete"
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            rates = [trial.params[LR] for trial in queries.trial_rows(connection, row.id)]
            return StudySpec.from_json(row.spec.json), rates, queries.digest(connection, row)


@pytest.mark.whole
def test_draws_are_those_of_the_density_that_is_named(home, rated, capsys):
    begun, rates, _ = drive(home, rated(), 10)
    assert begun.densities == {LR: "lr/sgd"} and "space densities" in begun.behaviour and not begun.planned
    assert notice(begun.densities) in capsys.readouterr().err
    assert all(1e-4 <= rate <= 1.0 for rate in rates)
    named, rates_named, _ = drive(home, rated('{"like": "lr/sgd"}'), 10, "named")
    assert rates == rates_named and named.densities == {}
    plain, rates_plain, _ = drive(home, rated(PLAIN), 10, "plain")
    assert rates != rates_plain and plain.densities == {} and "space densities" not in plain.behaviour


@pytest.mark.whole
def test_a_study_keeps_what_it_began_with(home, rated, capsys):
    plain = drive(home, rated(PLAIN), 12, "whole")
    drive(home, rated(PLAIN), 5, "parts")
    capsys.readouterr()
    assert drive(home, rated(), 12, "parts")[1:] == plain[1:], "a study begun before densities goes on without"
    assert "public benchmarks" not in capsys.readouterr().err
    followed = drive(home, rated(), 12, "followed")
    drive(home, rated(), 5, "in-parts")
    assert drive(home, rated(), 12, "in-parts")[1:] == followed[1:]
    with pytest.raises(DriftError, match="densities of good values"):
        drive(home, rated(PLAIN), 13, "in-parts")


def test_it_is_told_before_anything_is_written(tmp_path, rated):
    told: list[str] = []
    declare(request_of(Home(tmp_path / "none"), reference=rated()), None, 1, told.append)
    assert told == [notice({LR: "lr/sgd"})] and "train.optim.lr (like='lr/sgd')" in told[0]
