"""Declaring, configuring, loading and identifying studies."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import optuna
import pytest
from places import ROOT
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from rounds import rounds
from sqlalchemy import insert

from hpo import Choice, Float, Int, Objective, Study, load
from hpo.declaration import content
from hpo.declaration.identity import drift
from hpo.declaration.loading import source_parts
from hpo.declaration.spec import StudySpec
from hpo.errors import SpaceError, StorageError, StudyError, UserError
from hpo.ledger import Ledger
from hpo.ledger.database.tables import asks, attempts, reports, studies, trials, workers
from hpo.search.strategies.registry import default, make_strategy
from hpo.space.config import as_json, config_hash, parse_override
from hpo.space.paths import check_path
from hpo.storage.home import Home
from trainer.task import Task as TrainersTask


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Optim(Frozen):
    name: Literal["sgd", "adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    momentum: float = 0.9


class Train(Frozen):
    num_epochs: int = Field(3, ge=1)
    optim: Optim = Optim()


class Data(Frozen):
    path: str | None = None


class Model(Frozen):
    hidden_size: int = 64
    num_heads: int = 4

    @model_validator(mode="after")
    def _divisible(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
        return self


class Config(Frozen):
    train: Train = Train()
    model: Model = Model()
    data: Data = Data()


class Task:
    pass


SPACE = {
    "train.optim.lr": Float(1e-4, 1e-1, log=True),
    "train.optim.name": Choice(["sgd", "adamw"]),
    "train.optim.momentum": Float(0.0, 0.9, when={"train.optim.name": "sgd"}),
    "model.hidden_size": Int(16, 128, multiple_of="model.num_heads"),
}


def study(**changes):
    given = {
        "name": "toy",
        "config": Config(),
        "task": Task,
        "space": SPACE,
        "objectives": [Objective("val/loss")],
        "presets": {"full": {"model.hidden_size": 256, "train": {"num_epochs": 9}}},
        "data_paths": ("data.path",),
    }
    return Study(**(given | changes))


# --- Declaring


@rounds(
    ("changes", "words"),
    [
        ({"name": "../x"}, ["study name '../x'"]),
        ({"config": {"lr": 1}}, ["pydantic model"]),
        ({"task": Frozen()}, ["task=Frozen() must be a class, or its name as 'package.module:name'."]),
        ({"objectives": []}, ["at least one Objective"]),
        ({"objectives": Objective("val/loss")}, ["must be a list"]),
        ({"objectives": ["val/loss"]}, ["Objective"]),
        ({"metrics": "val/*"}, ["metrics='val/*' must be a list"]),
        ({"sampler": "tep"}, ["unknown sampler 'tep'", "did you mean 'tpe'"]),
        ({"strategy": "ahsa"}, ["unknown strategy 'ahsa'", "did you mean 'asha'"]),
        ({"strategy": {"name": "asha", "eta": 1}}, ["eta=1"]),
        ({"data_paths": ("data.pth",)}, ["unknown path 'data.pth'", "'data.path'"]),
        ({"presets": {"full": {"model.hiden_size": 1}}}, ["unknown path 'model.hiden_size'", "'model.hidden_size'"]),
        ({"space": {"train.optim.rl": Float(0, 1)}}, ["unknown path 'train.optim.rl'"]),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_sentence(changes, words):
    with pytest.raises(UserError) as caught:
        study(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_without_train_is_told_how_to_have_it():
    with pytest.raises(SpaceError, match=r"Config has no field 'train'; give it train: TrainConfig = TrainConfig\(\)"):
        check_path(create_model("Config", size=(int, 3)), "train.optim.lr")


@pytest.mark.parametrize("task", ["nosuch.task:Task", "json.nosuch:Task"])
def test_a_task_that_is_nowhere_is_noticed_before_a_run(task):
    with pytest.raises(StudyError, match=f"task='{task}': module .* does not exist"):
        study(task=task).check_task()


@rounds("missing", ["model", "train_set", "loss"])
def test_a_task_without_what_the_trainer_calls_is_noticed_before_a_run(missing):
    methods = {name: lambda self: None for name in ("model", "train_set", "loss") if name != missing}
    for base in (TrainersTask, object):
        with pytest.raises(StudyError, match=rf"study 'toy': task Half needs a method {missing}\(\), as "):
            study(task=type("Half", (base,), methods)).check_task()
    study(task=type("Whole", (TrainersTask,), methods | {missing: lambda self: None})).check_task()
    study(task=type("Loop", (), {"fit": lambda self: None})).check_task()


@pytest.mark.parametrize(("direction", "select"), [("max", "last"), ("minimize", "mean")])
def test_objective_names_what_it_takes(direction, select):
    with pytest.raises(StudyError, match=r"objective 'val/loss': .* must be"):
        Objective("val/loss", direction, select)


def test_configuration_that_json_cannot_hold_is_refused():
    class Base(Frozen):
        x: int = 1

    class More(Base):
        y: int = 2

    class Holder(Frozen):
        part: Base = More(y=3)  # pydantic writes the declared type's fields only

    with pytest.raises(StudyError, match="does not survive JSON"):
        study(config=Holder(), space={}, data_paths=(), presets={})


# --- Configuring


def test_preset_then_overrides_and_what_they_name_is_no_longer_searched():
    given = dict(
        [parse_override("preset=full"), parse_override("model.hidden_size=32"), parse_override("train.optim.name=sgd")]
    )
    configured = study().configure(given)
    assert configured.config.model.hidden_size == 32 and configured.config.train.num_epochs == 9
    assert configured.space.paths == ("train.optim.lr", "train.optim.momentum")
    assert configured.overrides == {
        "preset": "full",
        "model.hidden_size": 32,
        "train.num_epochs": 9,
        "train.optim.name": "sgd",
    }
    again = study().configure(json.loads(json.dumps(configured.overrides)))
    assert again.config == configured.config and content.identity(again) == content.identity(configured)
    assert "train.optim.momentum" not in study().configure({"train.optim.name": "adamw"}).space.paths


def test_nested_yaml_overrides_are_paths():
    assert study().configure({"train": {"optim": {"lr": 0.5}, "num_epochs": 7}}).overrides == {
        "train.optim.lr": 0.5,
        "train.num_epochs": 7,
    }


@rounds(
    ("overrides", "words"),
    [
        ({"preset": "ful"}, ["unknown preset 'ful'", "did you mean 'full'"]),
        ({"train.num_epoch": 3}, ["unknown path", "'train.num_epochs'"]),
        ({"train.num_epochs": "abc"}, ["train.num_epochs='abc'", "integer"]),
        ({"model.num_heads": 500}, ["hidden_size", "500"]),
        ({"model.num_heads": 200, "model.hidden_size": 64}, ["not divisible by num_heads 200"]),
    ],
)
def test_wrong_overrides_are_refused_in_one_sentence(overrides, words):
    with pytest.raises(SpaceError) as caught:
        study().configure(overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pinned_divisor_still_divides():
    configured = study().configure({"model.num_heads": 6, "model.hidden_size": 66}).configure({})
    assert configured.config.model.num_heads == 6
    with pytest.raises(SpaceError, match="not divisible by num_heads 6"):  # the base's own 64 is not
        study(space={}).configure({"model.num_heads": 6})


def test_refused_corners_of_a_space_are_told_before_the_first_trial():
    loose = study(space={"model.num_heads": Int(3, 4)})
    with pytest.raises(SpaceError, match=r"leads to a refused configuration.*not divisible by num_heads 3"):
        loose.configure({})


def test_build_and_rebuild_give_one_configuration():
    configured = study().configure({})
    params = configured.space.decode(configured.space.from_unit([0.1, 0.2, 0.3, 0.4]), configured.fixed())
    config = configured.build(params)
    assert config.train.optim.lr == params["train.optim.lr"]
    stored = json.loads(json.dumps(as_json(config)))
    assert configured.rebuild(stored, config_hash(config)) == config
    with pytest.raises(StudyError, match="its type has changed"):
        configured.rebuild(stored, "0" * 64)


# --- Identity


def test_identity_tells_what_changed(tmp_path):
    data = tmp_path / "panel.csv"
    data.write_text("a,b\n1,2\n")
    base = study().configure({"data.path": str(data)})
    old = content.identity(base)
    assert drift(old, content.identity(base)) == []
    other = study(space=SPACE | {"train.optim.lr": Float(1e-4, 1e-2, log=True)}).configure({"data.path": str(data)})
    assert drift(old, content.identity(other)) == [
        "dimension train.optim.lr changed from Float(low=0.0001, high=0.1, log=True, tier=1) "
        "to Float(low=0.0001, high=0.01, log=True, tier=1)"
    ]
    other = study(objectives=[Objective("val/loss", "maximize")]).configure({"data.path": str(data)})
    assert drift(old, content.identity(other)) == ["the objectives changed"]
    other = study().configure({"data.path": str(data), "train.num_epochs": 4})
    assert drift(old, content.identity(other)) == ["train.num_epochs changed from 3 to 4"]
    other = study().configure({"data.path": str(data), "train.optim.lr": 0.5})
    assert drift(old, content.identity(other)) == [
        "train.optim.lr changed from 0.001 to 0.5",
        "dimension train.optim.lr is gone",
    ]
    data.write_text("a,b\n1,3\n")
    assert drift(old, content.identity(base)) == ["the content of data.path changed"]
    data.unlink()
    with pytest.raises(UserError, match=r"data\.path=.*panel\.csv.* cannot be read: No such file"):
        content.identity(base)


def test_data_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert study().configure({"data.path": "x.csv"}).overrides == {"data.path": str(tmp_path / "x.csv")}
    assert study().configure({"data.path": None}).overrides == {"data.path": None}


def test_without_a_strategy_none_is_stopped_before_its_fifth_epoch():
    assert study().strategy == {} and study().sampler == {"name": "auto"}
    strategy = make_strategy(default(parts=1))
    assert strategy.name == "asha"
    assert not any(strategy.wants(epoch) for epoch in range(4)) and getattr(strategy, "several", False)
    assert replace(study(strategy="none"), name="other").strategy == {"name": "none"}


def test_spec_survives_json_and_names_what_changed():
    spec = StudySpec(
        reference="toy",
        name="toy",
        overrides={"a.b": 1},
        sampler="tpe",
        strategy={"name": "asha"},
        window=4,
        seed=1,
        objectives=[Objective("val/loss").to_json()],
        metrics=["val/*"],
    )
    assert StudySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for empty in (None, "none", [], {}, False):
        assert StudySpec.from_json(spec.to_json() | {"later": empty}) == spec
    with pytest.raises(StorageError, match=r"study 'toy' was begun by a newer release with later='a', which this one"):
        StudySpec.from_json(spec.to_json() | {"later": "a", "other": None})
    changed = spec.model_copy(update={"seed": 2, "window": 8, "strategy": {"name": "asha", "eta": 4}})
    clauses = drift(spec.identity(), changed.identity())
    assert clauses[0] == "seed changed from 1 to 2" and clauses[2] == "window changed from 4 to 8"
    spelled_out = {"name": "asha", "eta": 3, "min_epochs": 4, "max_epochs": None}
    assert drift(spec.identity(), spec.model_copy(update={"strategy": spelled_out}).identity()) == []


# --- Loading

BODY = """
from pydantic import BaseModel, ConfigDict
from hpo import Float, Objective, Study
{extra}
class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = 0.1

STUDY = Study("mine", Config(), {task!r}, {{"lr": Float(0, 1)}}, [Objective("val/loss")])
OTHER = Study("other", Config(), {task!r}, {{"lr": Float(0, 2)}}, [Objective("val/loss")])
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name="my_study.py", *, extra="", task=":Config", text=None):
        path = tmp_path / name
        path.write_text(BODY.format(extra=extra, task=task) if text is None else text)
        return path

    return write


@pytest.mark.usefixtures("process")
def test_a_user_file_loads_with_its_siblings_and_again_by_its_reference(write, tmp_path, monkeypatch):
    write("my_sibling_task.py", text="class Mine:\n    pass\n")
    path = write(extra="import my_sibling_task", task="my_sibling_task:Mine")
    monkeypatch.chdir(tmp_path)
    loaded = load("my_study.py")
    assert loaded.reference == str(path) and loaded.name == "mine"
    assert loaded.task_class().__name__ == "Mine" and content.directory(loaded) == tmp_path
    assert load(loaded.reference).config is loaded.config, "loaded once as long as its text stands"
    assert load(f"{path}:OTHER").reference == f"{path}:OTHER" and load(f"{path}:OTHER").name == "other"
    code = f"import hpo; from hpo.declaration import content; s = hpo.load({loaded.reference!r})\n"
    code += "print(s.module, s.task_class().__name__, sorted(content.identity(s)['code'].values()))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    code = str(sorted(content.identity(loaded)["code"].values()))
    assert run.stdout.split(maxsplit=2) == [loaded.module, "Mine", f"{code}\n"], "the same in every process"


@pytest.mark.parametrize("task", [":Config", ".my_relative_task:Mine"])
def test_relative_tasks_are_beside_the_declaration(write, task):
    write("my_relative_task.py", text="class Mine:\n    pass\n")
    assert load(str(write(task=task))).task_class().__name__ in ("Config", "Mine")


def test_a_changed_file_is_loaded_anew_and_has_another_identity(write):
    first = load(str(write()))
    second = load(str(write(extra="changed = 1")))
    assert second.module == first.module
    assert (
        drift(content.identity(first), {})
        and content.identity(second)["code"] == content.identity(load(str(write(extra="changed = 1"))))["code"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ny = 1 / 0\n", ["my_study.py:2:", "ZeroDivisionError", "division by zero"]),
        ("def f():\n    return 1\n\n  x = (\n", ["my_study.py:4:", "IndentationError"]),
        ("x = (\n", ["my_study.py:1:", "SyntaxError"]),
        ("x = 1\0\n", ["my_study.py: SyntaxError: source code string cannot contain null bytes"]),
        ("import nothing_like_it\n", ["my_study.py:1:", "ModuleNotFoundError", "nothing_like_it"]),
        ("import sys\nsys.exit(3)\n", ["my_study.py:2:", "SystemExit"]),
        ("raise ValueError('two\\nlines')\n", ["ValueError: two lines"]),
        ("x = 1\n", ["has no STUDY", "write STUDY = Study(...)"]),
        ("STUDY = 3\n", ["STUDY in", "is a int, not an hpo.Study"]),
        (
            BODY.format(extra="", task="x:Y").replace("STUDY", "MINE"),
            ["has no STUDY", "it has MINE, OTHER: give --study ", ":MINE, or another"],
        ),
        (
            BODY.format(extra="", task="x:Y").replace("Float(0, 1)", "Float(2, 1)"),
            ["my_study.py:9:", "lr: low=2 is above"],
        ),
    ],
)
def test_a_study_file_that_cannot_be_used_is_blamed_in_one_sentence(write, text, words):
    path = write(text=text)
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    if "has no STUDY" not in words[0] and "STUDY in" not in words[0]:
        assert caught.value.__cause__ is not None and caught.value.__cause__.__traceback__ is not None


@rounds(
    ("reference", "words"),
    [
        ("mpl", ["unknown study 'mpl'", "did you mean 'mlp'"]),
        ("atft_production", ["unknown study 'atft_production'", "did you mean 'atft'?"]),  # of older scripts
        ("", ["give a name"]),
        ("nowhere/my_study.py", ["nowhere/my_study.py cannot be read: No such file or directory; name another, or"]),
        ("some/where", ["unknown study 'some/where'", "FILE.py or FILE.yaml"]),
        ("mlp:STUDDY", ["has no STUDDY", "it has STUDY"]),
    ],
)
def test_an_unknown_reference_names_what_there_is(reference, words):
    with pytest.raises(StudyError) as caught:
        load(reference)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_without_its_ending_is_recognised(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("waves.py").write_text("STUDY = None")
    with pytest.raises(StudyError, match=r"unknown study 'wavse': .*did you mean 'waves\.py'\?"):
        load("wavse")
    for name in ("waves", "./waves", str(tmp_path / "waves")):
        with pytest.raises(
            StudyError, match=rf"unknown study '{name}': the file {name}\.py is meant by its whole name"
        ):
            load(name)


def test_a_shipped_study_loads_by_name():
    loaded = load("mlp")
    assert (loaded.reference, loaded.module, loaded.name) == ("mlp", "studies.mlp", "mlp")


@rounds(
    ("task", "words"),
    [
        ("nowhere", ["must read 'package.module:name'"]),
        ("no.such.module:Task", ["module 'no.such.module' does not exist"]),
        ("json.decoder:JSONDecoderr", ["json.decoder has no class 'JSONDecoderr'", "did you mean 'JSONDecoder'"]),
        (".task:Task", ["is relative", "hpo.load"]),
    ],
)
def test_a_task_that_leads_nowhere_is_named(task, words):
    with pytest.raises(StudyError) as caught:
        study(task=task).task_class()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_bug_in_the_tasks_own_imports_keeps_its_traceback(write):
    write("my_broken_task.py", text="import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        load(str(write(task="my_broken_task:Task"))).task_class()


# --- To Optuna


@pytest.fixture
def filled_home(tmp_path):
    """A ledger with a trial in every state, as the product's own writes leave it."""
    home = Home.at(tmp_path / "home").create()
    ledger = Ledger(home.storage)
    states = ["complete", "pruned", "infeasible", "failed", "running", "paused", "waiting"]
    with ledger.write() as connection:
        common = {"uid": "u", "created_at": 1.0, "state": "open", "requested": 7, "identity": {}, "environment": {}}
        connection.execute(insert(studies).values(id=1, name="toy", spec={}, **common))
        worker = {
            "id": "w",
            "host": "h",
            "pid": 1,
            "pid_started": "1",
            "slots": 1,
            "executor": "inline",
            "started_at": 1.0,
        }
        connection.execute(insert(workers).values(**worker))
        for number, state in enumerate(states):
            ended = number < 4
            row = {"id": number + 1, "study_id": 1, "number": number, "state": state, "created_at": 10.0}
            row |= {"started_at": None if state == "waiting" else 20.0, "ended_at": 30.0 if ended else None}
            row |= {"values": [0.5] if state == "complete" else None, "outcome": "complete" if ended else None}
            connection.execute(insert(trials).values(**row))
            sgd = number % 2 == 0
            params = {"train.optim.lr": 1e-3 * (number + 1), "train.optim.name": "sgd" if sgd else "adamw"}
            params |= {"model.hidden_size": 32} | ({"train.optim.momentum": 0.25} if sgd else {})
            ask = {
                "trial_id": number + 1,
                "draw": 0,
                "seed": 1,
                "told": 0,
                "params": params,
                "coordinates": {},
                "config": {},
            }
            connection.execute(insert(asks).values(**ask, config_hash="h", trial_attrs={}, study_attrs={}))
            if state != "waiting":
                attempt = {"trial_id": number + 1, "fence": 1, "worker_id": "w", "started_at": 20.0}
                connection.execute(insert(attempts).values(**attempt))
                for epoch in (1, 2):
                    value = None if state == "infeasible" and epoch == 2 else 1.0 / epoch
                    report = {"trial_id": number + 1, "step": 10 * epoch, "key": "val/loss", "fold": 0, "epoch": epoch}
                    connection.execute(insert(reports).values(**report, value=value, fence=1, revision=1, at=21.0))
    ledger.close()
    return home


def test_to_optuna_is_the_ledgers_study(filled_home):
    made = study().to_optuna(filled_home)
    T = optuna.trial.TrialState
    found = made.get_trials()
    assert [trial.number for trial in found] == list(range(7))
    assert [trial.state for trial in found] == [T.COMPLETE, T.PRUNED, T.PRUNED, T.FAIL, T.RUNNING, T.RUNNING, T.WAITING]
    assert [trial.user_attrs["state"] for trial in found][4:] == ["running", "paused", "waiting"]
    assert made.best_trial.number == 0 and made.best_value == 0.5 and made.user_attrs == {"metrics": ["val/loss"]}
    assert found[0].params == {
        "train.optim.lr": 1e-3,
        "train.optim.name": "sgd",
        "train.optim.momentum": 0.25,
        "model.hidden_size": 32,
    }
    assert found[0].intermediate_values == {1: 1.0, 2: 0.5} and found[6].intermediate_values == {}
    assert str(found[2].intermediate_values[2]) == "nan" and found[2].constraints == {"feasible": 1.0}
    assert (found[0].datetime_start.timestamp(), found[0].datetime_complete.timestamp()) == (20.0, 30.0)
    assert found[4].datetime_complete is None and found[6].datetime_start is None
    assert list(made.trials_dataframe()["number"]) == list(range(7))


def test_to_optuna_says_what_does_not_fit(filled_home):
    with pytest.raises(StudyError, match="no study 'absent'"):
        study().to_optuna(filled_home, "absent")
    narrow = study(space=SPACE | {"train.optim.lr": Float(0.5, 1.0)})
    with pytest.raises(StudyError, match="trial 0 does not fit the declared space"):
        narrow.to_optuna(filled_home)
    with pytest.raises(StudyError, match=r"trial 0 has .*, which the declared space does not search"):
        study(space={}).to_optuna(filled_home)


@pytest.mark.usefixtures("process")
def test_loading_a_study_is_torch_free():
    code = (
        "import sys, hpo; hpo.load('mlp').configure({});"
        "print([m for m in ('torch', 'mlflow', 'optuna', 'ray', 'numpy', 'sqlalchemy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_code_of_a_file_is_all_that_it_imports_from_its_directory(tmp_path):
    (tmp_path / "net").mkdir()
    for name, text in {
        "mine.py": "import hpo, helper\nfrom pydantic import BaseModel\nclass C(BaseModel):\n    a: int = 1\n"
        "STUDY = hpo.Study('s', C(), 'tasks:T', {'a': hpo.Int(1, 3)}, [hpo.Objective('m')])\n",
        "helper.py": "",
        "tasks.py": "from net import layers\nclass T: pass\n",
        "net/__init__.py": "",
        "net/layers.py": "",
        "apart.py": "",
    }.items():
        (tmp_path / name).write_text(text)

    def code() -> dict[str, str]:
        return content.identity(load(str(tmp_path / "mine.py")))["code"]

    before = code()
    for part, name in (("helper.py", "helper"), ("tasks.py", "tasks"), ("net/layers.py", "net"), ("mine.py", "")):
        with (tmp_path / part).open("a") as file:
            file.write("changed = 1\n")
        assert {label for label, found in code().items() if found != before[label]} == {name}
        before = code()
    (tmp_path / "apart.py").write_text("changed = 1\n")
    assert code() == before, "what is not imported does not belong to the study"


def test_the_code_of_a_file_in_a_package_is_the_package_anywhere(tmp_path):
    package = tmp_path / "here" / "mine"
    package.mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "layers.py": "",
        "train.py": "import hpo\nfrom pydantic import BaseModel\nclass C(BaseModel):\n    a: int = 1\n"
        "STUDY = hpo.Study('s', C(), 'studies.mlp.task:MlpTask', {'a': hpo.Int(1, 3)}, [hpo.Objective('m')])\n",
    }.items():
        (package / name).write_text(text)
    before = content.code_sha256(load(str(package / "train.py")))
    moved = tmp_path / "there"
    package.parent.rename(moved)
    (moved / "hpo").mkdir()
    (moved / "hpo" / "__init__.py").touch()
    assert content.code_sha256(load(str(moved / "mine" / "train.py"))) == before
    (moved / "mine" / "layers.py").write_text("changed = 1\n")
    assert content.code_sha256(load(str(moved / "mine" / "train.py"))) != before


def test_the_code_of_a_file_includes_the_shipped_studies_it_uses():
    parts = source_parts(ROOT / "studies" / "atft" / "train.py", "studies.mlp.task")
    assert {"", ".", "studies.atft", "studies.mlp"} == set(parts)


def test_a_checkpoint_to_start_from_is_data_by_its_manifest(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    base = load("mlp").configure({"train.resume_from": str(tmp_path)})
    old = content.identity(base)
    (tmp_path / "manifest.json").write_text("{ }")
    assert drift(old, content.identity(base)) == ["the content of train.resume_from changed"]


def test_of_many_changes_the_first_are_named():
    old = {"config": {f"a{i}": i for i in range(9)}}
    clauses = drift(old, {"config": dict.fromkeys(old["config"], -1)})
    assert clauses[0] == "a0 changed from 0 to -1" and clauses[-1] == "3 more changed" and len(clauses) == 7
    assert drift({"config": "0" * 64}, old) == ["the config changed"], "as an older ledger has it"
