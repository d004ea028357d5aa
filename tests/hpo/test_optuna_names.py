"""Habits of Optuna's users get an answer that names what stands in their place."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import optuna
import pytest
from study_runs import hpo as command
from study_runs import refused

import hpo
from hpo.cli.commands import OPTUNAS
from hpo.errors import HpoError, UserError
from hpo.search.samplers.registry import SAMPLERS
from hpo.search.strategies.registry import STRATEGIES
from hpo.space import optuna_names
from hpo.storage.home import Home

FUNCTION = """
import hpo
from hpo.cli.commands import OPTUNAS

@hpo.study(space={"lr": hpo.Float(0.1, 1.0)}, minimize="loss")
def train(trial):
    trial.report(1, {"loss": trial.params.lr})
    SUGGEST
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Home:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FUNCTION.replace("SUGGEST", ""))
    return Home.at(tmp_path / "home")


def test_trial_suggest_float_says_where_parameters_are_declared(process, home):
    (home.root.parent / "train.py").write_text(FUNCTION.replace("SUGGEST", "trial.suggest_float('lr', 0.1, 1.0)"))
    command("run", "train.py", "--trials", "1", "--executor", "inline", home=home)
    shown = json.loads(command("show", "0", "--json", home=home).stdout)
    assert (
        "trial has no suggest_float, which is Optuna's: declare it in the space, as space={'NAME': "
        "hpo.Float(low, high)}, and read trial.params.NAME." in shown["error"]
    )


@pytest.mark.parametrize(("name", "way"), optuna_names.OF_HPO.items())
def test_names_of_the_module_are_answered(name, way):
    with pytest.raises(AttributeError, match=f"module hpo has no {name}, which is Optuna's: "):
        getattr(hpo, name)
    assert not hasattr(hpo, "nonsense") and way


def test_a_choice_of_options_one_by_one_is_told_to_take_a_list():
    with pytest.raises(HpoError, match=r"Choice\('a', 'b'\): give the options as one list, Choice\(\['a', 'b'\]\)"):
        hpo.Choice("a", "b")  # pyright: ignore[reportCallIssue]
    made = hpo.Choice(["a", "b"], tier=2)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


@pytest.mark.parametrize("name", optuna_names.ARGUMENTS)
def test_arguments_are_answered(home, name):
    with pytest.raises(UserError, match=rf"hpo.run\(\) takes no {name}=, which is Optuna's: "):
        hpo.run("train.py", trials=1, home=home.root, progress=False, **{name: 1})
    with pytest.raises(UserError, match=f"@hpo.study takes no {name}=, which is Optuna's: "):
        hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss", **{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        hpo.run("train.py", nonsense=1)  # pyright: ignore[reportCallIssue]


def test_optunas_objects_are_answered_with_the_name(home):
    samplers = [optuna.samplers.CmaEsSampler(), optuna.samplers.TPESampler(), optuna.samplers.NSGAIISampler()]
    for sampler, name in zip(samplers, ("cmaes", "tpe", "nsga2"), strict=True):
        with pytest.raises(
            UserError, match=rf"\(\.\.\.\) names nothing: give its name, sampler='{name}', or with options"
        ):
            hpo.run("train.py", trials=1, home=home.root, progress=False, sampler=sampler)
    space = {"x": hpo.Float(0.0, 1.0)}
    with pytest.raises(UserError, match="give its name, strategy='median'"):
        hpo.study(space=space, minimize="loss", strategy=optuna.pruners.MedianPruner())(lambda_of_a_name)
    assert {*optuna_names._NAMES.values()} <= {*SAMPLERS, *STRATEGIES}
    assert all(hasattr(optuna.samplers, name) or hasattr(optuna.pruners, name) for name in optuna_names._NAMES)


def lambda_of_a_name(trial):
    return 1.0


def test_a_study_that_is_optimized_says_how_it_is_run(home):
    study = hpo.load("train.py")
    with pytest.raises(AttributeError, match=r"has no optimize, which is Optuna's: write hpo.run\(study, trials=100\)"):
        study.optimize  # noqa: B018
    assert pickle.loads(pickle.dumps(hpo.load("mlp"))).name == "mlp" and not hasattr(study, "nonsense")


@pytest.mark.parametrize(("option", "here"), OPTUNAS.items())
def test_options_of_the_command_line_are_answered(home, option, here):
    said = refused(command("run", "--study", "train.py", option, "1", home=home), 2)
    assert f"{option} is Optuna's: here it is {here}" in said


def test_a_file_alone_names_the_study(process, home):
    ran = command("run", "train.py", "--trials", "1", "--executor", "inline", home=home)
    assert ran.exit_code == 0 and "train: complete, 1 of 1 trial ended" in ran.output
    again = command("run", "--study", "train.py", "--trials", "2", "--executor", "inline", home=home)
    assert again.exit_code == 0 and "train: complete, 2 of 2 trials ended" in again.output
    both = refused(command("run", "train.py", "--study", "mlp", "--trials", "1", home=home), 2)
    assert "both name the study: leave one of them out" in both
    assert "no study is named: `hpo run FILE.py --trials 20" in refused(command("run", home=home), 2)


@pytest.mark.parametrize("name", ["nowhere.py", "nowhere.py:train", "nowhere.yaml"])
def test_a_file_that_is_not_there_is_refused_before_anything_heavy(process, home, name):
    said = refused(command("run", "--study", name, "--trials", "1", home=home), 2)
    file = home.root.parent / name.removesuffix(":train")
    assert (
        said.endswith(f"{file} cannot be read: No such file or directory; name another file.\n")
        and not home.root.exists()
    )
    code = (
        "import sys; from hpo.cli.options import declared\n"
        f"try: declared({name!r}, None)\n"
        "except Exception as error: print(error)\n"
        "assert not {'torch', 'sqlalchemy', 'pydantic', 'optuna'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
