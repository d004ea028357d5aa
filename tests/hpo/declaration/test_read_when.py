"""`read_when`: what a study reads only under a condition is refused where no trial meets it, in every kind of study."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.declaration import preflight
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import HpoError, SpaceError
from hpo.space.read_when import conditions, unread
from hpo.storage.home import Home

FUNCTION = """
import hpo

@hpo.study(
    space={"lr": hpo.Float(1e-3, 1.0), "optimizer": hpo.Choice(["adamw", "sgd"])},
    constants={"momentum": 0.9, "nesterov": False},
    minimize="loss",
    read_when={"momentum": "optimizer == 'sgd'", "nesterov": "optimizer == 'sgd' and momentum > 0"},
)
def train(trial):
    trial.report(1, {"loss": trial.params.lr})
"""
COMMAND = """
command: "true {lr} {optimizer} {momentum}"
space: {lr: {type: float, low: 0.001, high: 1.0}, optimizer: {type: choice, options: [adamw, sgd]}}
constants: {momentum: 0.9}
minimize: loss
read_when: {momentum: "optimizer == 'sgd'"}
"""


def refused(file: Path, home: Path, **overrides: object) -> str:
    resolved = declare(request_of(Home(home), reference=str(file), overrides=overrides), None, 1)
    try:
        preflight.check(resolved, options=[*overrides])
    except HpoError as error:
        return str(error)
    return ""


@pytest.fixture(params=[("study.py", FUNCTION), ("study.yaml", COMMAND)], ids=["function", "command"])
def file(request, tmp_path) -> Path:
    name, text = request.param
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_an_option_is_refused_only_where_no_trial_reads_it(file, tmp_path):
    assert refused(file, tmp_path / "home") == ""
    assert refused(file, tmp_path / "home", momentum=0.5) == "", "some trials have sgd"
    assert refused(file, tmp_path / "home", optimizer="sgd", momentum=0.5) == ""
    assert refused(file, tmp_path / "home", optimizer="adamw") == "", "defaults are never refused"
    assert refused(file, tmp_path / "home", optimizer="adamw", momentum=0.5) == (
        "momentum=0.5 is read only with optimizer == 'sgd', and optimizer is 'adamw' here: change that, or leave "
        "momentum out."
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"momentum": "optimizer"}', r"study 'train': read_when\['momentum'\]: rule 'optimizer' compares nothing"),
        ('{"momentun": "lr > 0"}', "study 'train': unknown path 'momentun': .* did you mean 'momentum'"),
        ('{"momentum": "optimiser == 1"}', "study 'train': unknown path 'optimiser': .* did you mean 'optimizer'"),
        ("[1]", r"study 'train': read_when=\[1\] must map fields to conditions"),
    ],
)
def test_a_wrong_condition_is_refused_when_the_study_is_made(tmp_path, text, sentence):
    wanted = '{"momentum": "optimizer == \'sgd\'", "nesterov": "optimizer == \'sgd\' and momentum > 0"}'
    (tmp_path / "wrong.py").write_text(FUNCTION.replace(wanted, text))
    with pytest.raises(HpoError, match=sentence):
        declare(request_of(Home(tmp_path), reference=str(tmp_path / "wrong.py")), None, 1)


def test_a_path_stands_for_all_below_it_and_all_its_conditions_hold():
    declared = conditions({"graph.*": "model.graph == True", "graph.top_k": "model.heads > 1"})

    def found(**values: object) -> list[str]:
        possible = {"model.graph": [True], "model.heads": [1]} | {
            f"model.{name}": value for name, value in values.items()
        }
        return [path for path, _ in unread(["graph.top_k", "graph.window", "graphs"], declared, possible.get)]

    assert found() == ["graph.top_k"]
    assert found(heads=[1, 2]) == []
    assert found(graph=[False], heads=[2]) == ["graph.top_k", "graph.window"]
    assert found(graph=None, heads=[2]) == [], "a field that may have any value"


def test_a_text_that_is_no_condition_is_named():
    with pytest.raises(SpaceError, match=r"read_when\['x'\]: rule '1 \+' cannot be read"):
        conditions({"x": "1 +"})
