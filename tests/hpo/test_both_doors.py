"""An override, a sampler and a strategy are accepted, refused and understood alike by the command and by Python."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import hpo
from hpo.cli.main import app

# Its check, which is asked once everything else is accepted, ends the run before anything is written.
STUDY = """
from typing import Literal

from pydantic import BaseModel, ConfigDict
from hpo import Choice, Float, Objective, Study
from hpo.errors import UserError
from hpo.space.config import config_hash
from trainer.config import TrainConfig


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = 4
    rate: float = 0.5
    title: str = "a"
    maybe: int | None = 2
    flag: bool = False
    sizes: tuple[int, ...] = (1,)
    kind: Literal["wide", "deep"] = "wide"
    weights: dict[str, float] = {"a": 1.0}
    labels: dict[str, str] = {}
    level: int | str = 1
    code: Literal["1", "2"] = "1"
    train: TrainConfig = TrainConfig(num_epochs=2)


class Task:
    def fit(self, reporter, checkpoints):
        raise AssertionError("nothing is trained")


def check(config):
    raise UserError(f"accepted: {config_hash(config)}")


STUDY = Study(
    "doors",
    Config(),
    Task,
    {"train.optim.lr": Float(1e-4, 1e-1, log=True), "size": Choice([4, 8])},
    [Objective("val/loss", "minimize")],
    presets={"small": {"size": 8}},
    check=".study:check",
)
"""

# -o PATH=VALUE, and the value in Python. A field of text takes what is typed as it stands, and a number as its text.
ACCEPTED = [
    ("size=8", 8),
    ("size=8", "8"),
    ("size=8", np.int64(8)),
    ("rate=1", 1),
    ("rate=0.25", 0.25),
    ("rate=1e-3", "1e-3"),
    ("rate=0.5", np.float64(0.5)),
    ("title=b", "b"),
    ("title=8", "8"),
    ("title=8", 8),
    ("title=8", np.int64(8)),
    ("title=0.5", 0.5),
    ("title=007", "007"),
    ("labels.a=8", 8),
    ("labels.a=8", "8"),
    ("title=null", "null"),
    ("title=a: b", "a: b"),
    ("title='{a: b}'", "{a: b}"),
    ("maybe=null", None),
    ("maybe=7", 7),
    ("flag=true", True),
    ("flag=true", "true"),
    ("sizes=[1, 2]", [1, 2]),
    ("sizes=[1, 2]", (1, 2)),
    ("sizes=[1, 2]", [np.int64(1), 2]),
    ("sizes=[]", []),
    ("kind=deep", "deep"),
    ("weights={b: 2}", {"b": 2}),
    ("weights={}", {}),
    ("weights.b=2", 2.0),
    ("level=8", 8),
    ("level=0.5", 0.5),
    ("code=2", 2),
    ("train.optim={lr: 0.1}", {"lr": 0.1}),
    ("train.optim={name: sgd, momentum: 0.5}", {"name": "sgd", "momentum": 0.5}),
    ("train={optim: {name: sgd}, num_epochs: 3}", {"optim": {"name": "sgd"}, "num_epochs": 3}),
    ("train.average={name: ema, decay: 0.9}", {"name": "ema", "decay": 0.9}),
    ("preset=small", "small"),
    ("preset=null", None),
]
REFUSED = [
    ("size=8.5", 8.5),
    ("size=eight", "eight"),
    ("size=true", True),
    ("size=null", None),
    ("size=[8]", [8]),
    ("rate=fast", "fast"),
    ("rate=true", True),
    ("rate=.inf", float("inf")),
    ("rate=.nan", float("nan")),
    ("maybe=half", "half"),
    ("flag=1", 1),
    ("flag=no", "no"),
    ("sizes=3", 3),
    ("sizes=[1, x]", [1, "x"]),
    ("kind=flat", "flat"),
    ("weights={b: x}", {"b": "x"}),
    ("code=3", 3),
    ("labels={a: [1]}", {"a": [1]}),
    ("train.num_epochs=0", 0),
    ("train.num_epochs=3000000000", 3_000_000_000),
    ("train.optim.lr.x=1", 1),
    ("train.optim={nosuch: 1}", {"nosuch": 1}),
    ("train.optim={name: sgdd}", {"name": "sgdd"}),
    ("train={nosuch: {lr: 1}}", {"nosuch": {"lr": 1}}),
    ("train.prefetch=8", 8),  # which no trial reads
    ("train={prefetch: 8}", {"prefetch": 8}),
    ("nosuch=1", 1),
    ("title.x=1", 1),
    ("preset=large", "large"),
    ("preset=[small]", ["small"]),
]


def outcome(error: str) -> str:
    """Returns the sentence without quotes and refused values: text is quoted, and null is None in Python."""
    plain = re.sub(r"['\"]", "", error.removeprefix("error: ").strip())
    return re.sub(r"=(.+) is refused: ", "= is refused: ", plain)


@pytest.fixture
def doors(tmp_path):
    """Returns what becomes of options of the command, and of arguments in Python."""
    study = tmp_path / "study.py"
    study.write_text(STUDY)
    home = tmp_path / "home"

    def by_command(*words: str) -> str:
        asked = ["run", "--study", str(study), "--trials", "1", "--executor", "inline", "--home", str(home), *words]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 2 and not home.exists(), result.output
        return outcome(result.stderr)

    def by_python(**arguments) -> str:
        with pytest.raises(hpo.HpoError) as caught:
            hpo.run(str(study), trials=1, executor="inline", home=home, progress=False, **arguments)
        assert not home.exists()
        return outcome(str(caught.value))

    return by_command, by_python


def both(doors, override: str, value: object) -> str:
    by_command, by_python = doors
    path = override.partition("=")[0]
    said = by_python(overrides={path: value})
    assert by_command("-o", override) == said
    return said


@pytest.mark.parametrize(("override", "value"), ACCEPTED)
def test_an_override_that_is_accepted_gives_one_configuration(doors, override, value):
    assert both(doors, override, value).startswith("accepted: ")


@pytest.mark.parametrize(("override", "value"), REFUSED)
def test_an_override_that_is_refused_is_refused_in_one_sentence(doors, override, value):
    assert not both(doors, override, value).startswith("accepted: ")


@pytest.mark.parametrize("value", [None, True, float("nan"), [8]])
def test_text_is_a_text_or_a_number_in_python(doors, value):
    assert "input should be a" in doors[1](overrides={"title": value})


def test_yaml_quotes_a_text_that_would_be_a_number(doors, tmp_path):
    """YAML has 7 for 007 and 1.1 for 1.10, and has lost what was written."""
    by_command, by_python = doors
    file = tmp_path / "labels.yaml"
    for text, words in {"{a: 1.10}": "valid string", "{a: '1.10'}": "accepted"}.items():
        file.write_text(f"labels: {text}")
        said = by_python(config=file)
        assert words in said and by_command("--config", str(file)) == said
        assert by_command("-o", f"labels={text}") == said
    assert by_python(overrides={"labels": {"a": "1.10"}}) == said


def test_what_a_file_sets_may_be_left_unread_by_both(doors, tmp_path):
    by_command, by_python = doors
    file = tmp_path / "best.yaml"
    file.write_text("train: {prefetch: 8, optim: {lr: 0.01}}")
    said = by_python(config=file)
    assert said.startswith("accepted: ") and by_command("--config", str(file)) == said
    over = by_python(config=file, overrides={"train.optim.lr": 0.5})
    assert over != said and by_command("--config", str(file), "-o", "train.optim={lr: 0.5}") == over


def test_overrides_that_are_not_a_mapping_are_refused(doors):
    _, by_python = doors
    assert by_python(overrides=["size=8"]).startswith("overrides=[size=8]: give a mapping of paths to values")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("strategy", "ashaa", "is not known: choose one of"),
        ("strategy", {"name": "ashaa"}, "is not known: choose one of"),
        ("strategy", {"name": "asha", "min_epoch": 2}, "strategy asha has no option min_epoch; it has min_epochs"),
        ("strategy", {"name": "asha", "min_epochs": "2"}, "strategy asha: min_epochs= is refused"),
        ("strategy", {"name": "asha", "min_epochs": "2", "max_epochs": 1}, "min_epochs= is refused"),
        ("strategy", {}, "strategy={}: give a name, or a mapping with one"),
        ("strategy", {"min_epochs": 2}, "give a name, or a mapping with one"),
        ("strategy", ["asha"], "give a name, or a mapping with one"),
        ("sampler", {"name": "tpee"}, "is not known: choose one of"),
        ("sampler", {"name": "tpe", "startup": 3}, "sampler tpe has no option startup; it has n_startup_trials"),
        ("sampler", {"name": "tpe", "n_startup_trials": 0}, "n_startup_trials=0 must be a whole number from 1."),
        ("sampler", 7, "sampler=7: give a name, or a mapping with one"),
    ],
)
def test_a_sampler_and_a_strategy_with_options_are_held_against_them(doors, option, value, words):
    assert words in doors[1](**{option: value})


def test_a_sampler_and_a_strategy_with_options_are_accepted(doors):
    _, by_python = doors
    accepted = by_python(strategy={"name": "asha", "min_epochs": np.int64(1)}, sampler={"name": "tpe"})
    assert accepted.startswith("accepted: ")


NAMES = {"-o": "overrides", "--tracker": "trackers", "--alert": "alerts", "--tag": "tags"}
OF_A_DOOR = {"json", "log_format", "progress"}  # how a door shows what happens


@pytest.mark.parametrize(("command", "function"), [("run", hpo.run), ("resume", hpo.resume)])
def test_the_options_of_a_command_are_the_arguments_of_its_function(command, function):
    typed = get_command(app).commands[command].params  # pyright: ignore[reportAttributeAccessIssue]
    flags = [flag for param in typed for flag in param.opts if flag.startswith("-")]
    options = {NAMES.get(flag, flag.removeprefix("--").replace("-", "_")) for flag in flags}
    assert options - OF_A_DOOR == inspect.signature(function).parameters.keys() - OF_A_DOOR
