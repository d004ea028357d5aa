"""A study's file: what it declares, what of it is its identity, and what is refused in a sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from study_runs import hpo, refused

from hpo import Constraint, Float, Int, Objective, load
from hpo.declaration import content
from hpo.declaration.command import placeholders
from hpo.errors import HpoError, StudyError
from hpo.storage.home import Home

SPACE = {
    "lr": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True},
    "width": {"type": "int", "low": 4, "high": 64},
}
FILE = {"command": "{python} train.py --lr={lr} ${args}", "space": SPACE, "minimize": "val/loss"}


def write(place: Path, **changes: Any) -> str:
    """The path of a study's file, beside a script."""
    (place / "train.py").touch()
    document = {key: value for key, value in (FILE | changes).items() if value is not None}
    (place / "train.yaml").write_text(yaml.safe_dump(document))
    return str(place / "train.yaml")


def test_a_file_declares_a_study(tmp_path):
    study = load(
        write(
            tmp_path,
            name="mine",
            maximize=["val/accuracy"],
            constraints=[{"metric": "val/latency", "upper": 2}],
            constants={"depth": 3},
            num_epochs=7,
            steps_per_epoch=500,
            directory="..",
            environment={"LEVEL": "{width}", "N": 3},
            timeout="1h30m",
            exit_codes={"infeasible": [3], "lost": [75]},
            strategy="none",
        )
    )
    assert study.name == "mine" and study.reference == str(tmp_path / "train.yaml")
    assert study.space.dimensions["lr"] == Float(1e-4, 1e-1, log=True) and study.space.dimensions["width"] == Int(4, 64)
    assert study.objectives == (Objective("val/loss"), Objective("val/accuracy", "maximize"))
    assert study.constraints == (Constraint("val/latency", upper=2),)
    config: Any = study.config
    assert (config.depth, config.train.num_epochs) == (3, 7)
    command: Any = study.task_class().command  # pyright: ignore[reportAttributeAccessIssue]
    assert command.directory.samefile(tmp_path.parent) and command.timeout == 5400
    assert command.exit_codes == {3: "infeasible", 75: "lost"} and command.steps_per_epoch == 500
    assert content.directory(study) == tmp_path


def test_its_name_is_the_files_unless_it_has_one(tmp_path):
    assert load(write(tmp_path)).name == "train"


BAD_SPACES = [
    ({"lr": {"type": "real", "low": 0, "high": 1}}, "space.lr: type='real' is none of float, int, choice, bool"),
    ({"lr": {"type": "flaot", "low": 0, "high": 1}}, "did you mean 'float'?"),
    ({"lr": {"low": 0, "high": 1}}, "space.lr: type=None is none of"),
    ({"lr": {"type": "float", "low": 1.0, "high": 0.1}}, "lr: low=1.0 is above high=0.1; swap them"),
    ({"lr": {"type": "float", "low": 0.0, "high": 0.1, "log": True}}, "lr: log needs low above 0, not 0.0"),
    ({"lr": {"type": "float", "low": 0.1}}, "space.lr: type float needs high"),
    ({"lr": {"type": "int", "low": 0.5, "high": 2}}, "lr: low=0.5 must be a whole number"),
    ({"lr": {"type": "float", "low": 0, "high": 1, "max": 2}}, "space.lr: type float has no 'max': it has low, high"),
    ({"lr": {"type": "choice", "options": []}}, "lr: options are empty"),
    ({"lr": [0, 1]}, "space.lr=[0, 1] is not a dimension: write {type: float, low: 0.0, high: 1.0}"),
    ({}, "space is empty: write such as"),
    ({"learning-rate": {"type": "float", "low": 0, "high": 1}}, "parameter 'learning-rate' must be a name"),
    ({"seed": {"type": "int", "low": 0, "high": 1}}, "a parameter cannot be called 'seed'"),
]


@pytest.mark.parametrize(("space", "said"), BAD_SPACES)
def test_a_space_that_cannot_be_searched_is_refused(tmp_path, space, said):
    file = write(tmp_path, space=space, command="true")
    with pytest.raises(HpoError, match=re.escape(said)) as refusal:
        load(file)
    assert str(refusal.value).startswith(f"{file}: ") and "\n" not in str(refusal.value)


BAD_KEYS = [
    ({"comand": "x"}, "did you mean 'command'?"),
    ({"exit_codes": {"infeasable": [3]}}, "exit_codes: there is no 'infeasable'; did you mean 'infeasible'?"),
    ({"colour": "x"}, "unknown key 'colour'; known: command, space, name"),
    ({"command": None}, "command"),
    ({"command": ""}, "command is empty"),
    ({"command": "train 'half"}, "No closing quotation"),
    ({"command": "train --lr={rate}"}, "nothing fills '{rate}' in '--lr={rate}'"),
    ({"command": "train --epochs={num_epochs}"}, "nothing fills '{num_epochs}' in '--epochs={num_epochs}'"),
    ({"command": "train --lr=${lr}"}, "${lr} in '--lr=${lr}' is for a shell: write {lr}"),
    ({"command": "train x${args}"}, "${args} in 'x${args}' must be a word of its own"),
    ({"minimize": None}, "say what it is judged by"),
    ({"num_epochs": 0}, "num_epochs=0 must be a whole number from 1"),
    ({"steps_per_epoch": 0}, "steps_per_epoch"),
    ({"timeout": "soon"}, "timeout='soon' is not a duration"),
    ({"timeout": -1}, "timeout"),
    ({"exit_codes": {"infeasible": [3], "lost": [3]}}, "exit_codes: 3 is infeasible and lost"),
    ({"exit_codes": {"bad": [3]}}, "exit_codes"),
    ({"output": {"val/loss": "loss (.*"}}, "is not a regular expression"),
    ({"output": {"val/loss": "loss"}}, "has 0 groups: put the number, and it alone, in (parentheses)"),
    ({"output": {"train/loss": "(x)"}}, "output has no pattern for 'val/loss', by which the study judges"),
    ({"output": {"epoch": "(x)", "step": "(x)", "val/loss": "(x)"}}, "output has epoch and step"),
    ({"name": "a/b"}, "study name 'a/b' cannot be used"),
    ({"environment": {"A": ["b"]}}, "environment"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_KEYS)
def test_a_key_that_cannot_be_meant_is_refused(tmp_path, changes, said):
    file = write(tmp_path, **changes)
    with pytest.raises(HpoError, match=re.escape(said)) as refusal:
        load(file)
    assert str(refusal.value).startswith(f"{file}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("command: !!python/object/apply:os.system ['touch MARK']\n", "is not allowed"),
        ("space: {lr: !!python/name:os.system }\n", "is not allowed"),
        ("command: a\ncommand: b\n", "command"),
        ("- a\n", "the file must hold a mapping"),
        ("command: [a\n", ":2:"),
    ],
)
def test_code_in_a_file_is_refused_and_never_run(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text)
    with pytest.raises(HpoError, match=re.escape(said)):
        load("bad.yaml")
    assert not Path("MARK").exists()


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(HpoError, match=r"/nowhere/train\.yaml cannot be read: No such file or directory"):
        load("/nowhere/train.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": "no-such-program {lr}"}, "'no-such-program' is not a program that this host can run"),
        ({"command": "./train.py {lr}"}, "'./train.py' is a file that may not be executed: run `chmod +x"),
        ({"command": "{python} nofit.py --lr={lr}"}, "train.yaml: command: the script 'nofit.py' is missing in "),
        ({"directory": "absent"}, "is not a directory: make it, or name another"),
        ({"code": ["absent.py"]}, "absent.py, which is not there"),
    ],
)
def test_what_cannot_run_here_is_refused_before_anything_is_written(tmp_path, changes, said):
    home = Home(tmp_path / "home")
    ran = hpo("run", "--study", write(tmp_path, **changes), "--trials", "1", home=home)
    assert said in refused(ran, 2)
    assert not home.root.exists()


# --- Identity


def drifted(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    from hpo.declaration.identity import drift

    old = content.identity(load(write(tmp_path, **before)))
    return drift(old, content.identity(load(write(tmp_path, **after))))


@pytest.mark.parametrize(
    ("after", "drift"),
    [
        ({}, []),
        ({"timeout": "2h", "silence": 60, "grace": 1}, []),
        ({"command": "{python} train.py --lr={lr}"}, ["the code of the study changed"]),
        ({"environment": {"A": "b"}}, ["the code of the study changed"]),
    ],
)
def test_what_a_file_means_is_the_studys_identity(tmp_path, after, drift):
    assert drifted(tmp_path, {}, after) == drift


def test_a_comment_or_the_order_of_keys_is_no_drift(tmp_path):
    from hpo.declaration.identity import drift

    file = Path(write(tmp_path))
    old = content.identity(load(str(file)))
    document = yaml.safe_load(file.read_text())
    file.write_text("# a comment\n" + yaml.safe_dump(dict(reversed(document.items())), sort_keys=False))
    assert drift(old, content.identity(load(str(file)))) == []


def test_the_files_of_a_command_are_its_code(tmp_path):
    from hpo.declaration.identity import drift

    (tmp_path / "model.py").write_text("size = 1\n")
    (tmp_path / "extra.cfg").write_text("a")
    (tmp_path / "train.py").write_text("import model\n")
    study = load(write(tmp_path, code=["extra.cfg"]))
    old = content.identity(study)
    assert set(old["code"]) == {"", "train.py", "model beside train.py", "extra.cfg"}
    (tmp_path / "model.py").write_text("size = 2\n")
    (tmp_path / "extra.cfg").write_text("b")
    assert drift(old, content.identity(study)) == [
        "the code of extra.cfg changed",
        "the code of model beside train.py changed",
    ]


# --- Words


def test_places_are_filled_and_a_value_stays_one_word():
    given = ["--lr={lr}", "{name}", "${args}", "{{lr}}", '{"a": {"b": 1}}', "${HOME}", "{flag}"]
    values = {"lr": 1e-5, "name": "a b; rm -rf /", "flag": True}
    assert placeholders.filled(given, values, {"lr": 1e-5, "flag": False, "none": None, "list": [1, 2]}) == [
        "--lr=1e-05",
        "a b; rm -rf /",
        "--lr=1e-05",
        "--flag=False",
        "--none=None",
        "--list=[1, 2]",
        "{lr}",
        '{"a": {"b": 1}}',
        "${HOME}",
        "True",
    ]


def test_numbers_come_back_as_they_were():
    for value in (0.1 + 0.2, 1e-300, 123456789012345678, -0.0):
        assert type(value)(placeholders.as_text(value)) == value


def test_a_command_of_one_text_is_split_without_a_shell():
    assert placeholders.split("a 'b c' $HOME", "command") == ["a", "b c", "$HOME"]
    with pytest.raises(StudyError, match="close the quotation"):
        placeholders.split('a "b', "command")


def test_the_interpreter_is_no_part_of_the_code(tmp_path):
    study = load(write(tmp_path, command=[sys.executable, "train.py"]))
    assert set(content.code(study)) == {"train.py"}
