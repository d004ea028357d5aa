"""A sweep file of Weights & Biases: read where it means the same, refused by its key where it does not."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from hpo import Choice, Float, Int, Objective, load
from hpo.declaration import content
from hpo.declaration.command import placeholders
from hpo.errors import HpoError

# As in https://docs.wandb.ai/guides/sweeps: hyperband, each kind of parameter that is known here.
SWEEP = """
program: train.py
method: bayes
name: sweepdemo
project: shown-there
description: nothing of the search
metric: {goal: minimize, name: validation_loss}
early_terminate: {type: hyperband, min_iter: 3, eta: 2}
parameters:
  batch_size: {values: [16, 32, 64]}
  epochs: {value: 5}
  hidden: {min: 8, max: 64}
  lr: {min: 0.0001, max: 0.1}
  decay: {distribution: log_uniform_values, min: 1e-6, max: 1e-2}
  momentum: {distribution: log_uniform, min: -4, max: -1}
  dropout: {distribution: q_uniform, min: 0.0, max: 0.5, q: 0.1}
  optimizer: {distribution: categorical, values: [adam, sgd]}
command: ["${env}", "${interpreter}", "${program}", "--verbose", "${args}"]
"""


def write(place: Any, **changes: Any) -> str:
    document = {key: value for key, value in (yaml.safe_load(SWEEP) | changes).items() if value is not None}
    (place / "train.py").touch()
    (place / "sweep.yaml").write_text(yaml.safe_dump(document))
    return str(place / "sweep.yaml")


def test_a_sweep_is_a_study(tmp_path):
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "train.py").touch()
    study = load(str(tmp_path / "sweep.yaml"))
    config: Any = study.config
    assert study.name == "sweepdemo" and study.objectives == (Objective("validation_loss", "minimize"),)
    assert study.sampler["name"] == "gp" and config.epochs == 5
    assert study.strategy | {"min_epochs": 3, "eta": 2, "name": "asha"} == study.strategy
    dimensions = study.space.dimensions
    assert dimensions.pop("momentum") == Float(math.exp(-4), math.exp(-1), log=True)
    assert dimensions == {
        "batch_size": Choice([16, 32, 64]),
        "hidden": Int(8, 64),
        "lr": Float(0.0001, 0.1),
        "decay": Float(1e-6, 1e-2, log=True),
        "dropout": Float(0.0, 0.5, step=0.1),
        "optimizer": Choice(["adam", "sgd"]),
    }
    command: Any = study.task_class().command  # pyright: ignore[reportAttributeAccessIssue]
    assert command.words == ["/usr/bin/env", "python", "train.py", "--verbose", placeholders.ALL]
    assert set(content.code(study)) == {"train.py"}


def test_without_a_command_it_has_that_of_sweeps(tmp_path):
    command: Any = load(write(tmp_path, command=None)).task_class().command  # pyright: ignore[reportAttributeAccessIssue]
    assert command.words == ["/usr/bin/env", "python", "train.py", placeholders.ALL]


def test_the_rungs_of_max_iter_are_those_of_its_brackets(tmp_path):
    """max_iter 27, s 2, eta 3: brackets at 27 / 3 = 9 and 27 / 9 = 3."""
    study = load(write(tmp_path, early_terminate={"type": "hyperband", "max_iter": 27, "s": 2}))
    assert {key: study.strategy[key] for key in ("name", "min_epochs", "eta", "max_epochs")} == {
        "name": "asha",
        "min_epochs": 3,
        "eta": 3,
        "max_epochs": 27,
    }


def test_nothing_stops_early_where_a_sweep_does_not_say_so(tmp_path):
    assert load(write(tmp_path, early_terminate=None)).strategy["name"] == "none"


def test_a_parameter_may_have_dots(tmp_path):
    study = load(write(tmp_path, parameters={"optim.lr": {"min": 0.1, "max": 0.5}, "optim.beta": {"value": 0.9}}))
    assert study.space.dimensions == {"optim.lr": Float(0.1, 0.5)}
    config: Any = study.build({"optim.lr": 0.2})
    assert (config.optim.lr, config.optim.beta) == (0.2, 0.9)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["optim", "optim.lr"], "'optim' cannot be a parameter beside 'optim.lr', which is below it: rename one"),
        (["lr-max"], "parameter 'lr-max' must be a name such as 'lr' or 'optim.lr': take letters, digits"),
        (["optim."], "parameter 'optim.' must be a name such as"),
        (
            ["optim.lambda"],
            "parameter 'optim.lambda' must be a name such as 'lr' or 'optim.lr': call it 'optim.lambda_'",
        ),
        (["train.lr"], "cannot be called 'train.lr'"),
        (["optim.copy"], "cannot be called 'optim.copy'"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(tmp_path, names, said):
    with pytest.raises(HpoError, match=re.escape(said)):
        load(write(tmp_path, parameters={name: {"min": 0.1, "max": 0.5} for name in names}))


def test_keys_of_a_commands_file_may_stand_beside(tmp_path):
    study = load(write(tmp_path, output={"validation_loss": "loss (.*)"}, num_epochs=5))
    assert study.config.train.num_epochs == 5  # pyright: ignore[reportAttributeAccessIssue]


REFUSED = [
    ({"run_cap": 20}, "run_cap=20 of a W&B sweep is not known here: give `hpo run --trials 20` instead"),
    ({"method": "bayesian"}, "method='bayesian' is none of grid, random, bayes; did you mean 'bayes'?"),
    ({"controller": {"type": "local"}}, "controller="),
    ({"imports": ["a"]}, "imports="),
    ({"metric": None}, "metric is missing"),
    ({"metric": {"name": "a", "goal": "minimise"}}, "metric.goal='minimise' must be minimize or maximize"),
    ({"metric": {"name": "a", "target": 0.1}}, "metric.target=0.1 has no equal here: take name, goal"),
    ({"early_terminate": {"type": "envelope"}}, "early_terminate.type='envelope' has no equal here"),
    ({"early_terminate": {"type": "hyperband", "min_iter": 3, "strict": True}}, "early_terminate.strict=True has no"),
    ({"early_terminate": {"type": "hyperband", "max_iter": 10, "s": 2}}, "give no whole first rung"),
    ({"early_terminate": {"type": "hyperband", "min_iter": 3, "s": 2}}, "early_terminate.s=2 stands beside min_iter"),
    ({"command": ["${program}", "${args_no_hyphens}"]}, "command: '${args_no_hyphens}' has no equal here"),
    ({"program": None}, "program=None: name the script"),
    ({"strategy": "asha"}, "strategy stands in a W&B sweep"),
    ({"nonsense": 1}, "unknown key 'nonsense'"),
    ({"parameters": {"a": {"distribution": "normal", "mu": 0}}}, "parameters.a.distribution='normal' has no equal"),
    ({"parameters": {"a": {"values": [1, 2], "probabilities": [0.9, 0.1]}}}, "parameters.a.probabilities=[0.9, 0.1]"),
    ({"parameters": {"a": {"parameters": {"b": {"value": 1}}}}}, "parameters.a.parameters="),
    ({"parameters": {"a": {"min": 2, "max": 1}}}, "low=2 is above high=1"),
    ({"parameters": {"a": {"min": 0.0, "max": 1.0, "distribution": "q_uniform", "q": 0.3}}}, "step=0.3 does not lead"),
    ({"parameters": {"a": 1}}, "parameters.a=1 must be a mapping"),
    ({"parameters": {"batch-size": {"values": [1, 2]}}}, "parameter 'batch-size' must be a name"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_has_no_equal_is_refused_by_its_key(tmp_path, changes, said):
    file = write(tmp_path, **changes)
    with pytest.raises(HpoError, match=re.escape(said)) as refusal:
        load(file)
    assert str(refusal.value).startswith(f"{file}: ") and "\n" not in str(refusal.value)
