"""`hpo promote`: what MLflow's registry then has, what opens it, and that a kill or a second call changes nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from made_rows import study_row
from mlflow import MlflowClient
from typer.testing import CliRunner

import hpo
from hpo.analysis.models.checkpoints import KeptCheckpoint
from hpo.analysis.models.registered_model import facts
from hpo.analysis.report import data
from hpo.cli.main import app
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home
from hpo.tracking.base import Point
from hpo.verify import verify
from trainer.checkpoint.location import DISK
from trainer.files.durable import sha256

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]
STUDY = """
from promoted_net import Net, points
from torch.nn import functional as F

from hpo import Float, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.data import TensorDataset
from trainer.task import Loss, Task


class Data(Frozen):
    path: str = "points.csv"


class Config(Frozen):
    data: Data = Data()
    train: TrainConfig = TrainConfig(num_epochs=2)


class Fit(Task):
    def model(self):
        return Net()

    def train_set(self):
        return TensorDataset(*points(self.config.data.path))

    def loss(self, model, batch):
        left, right, y = batch
        return Loss(F.mse_loss(model(left, right=right), y, reduction="sum"), len(y))

    def evaluate(self, model):
        left, right, y = points(self.config.data.path)
        return {"val/loss": F.mse_loss(model(left, right=right), y).item()}


STUDY = Study(
    name="fit",
    config=Config(),
    task=Fit,
    space={"train.optim.lr": Float(1e-3, 1e-1, log=True)},
    objectives=[Objective("val/loss", "minimize")],
    data_paths=["data.path"],
)
"""
NET = """
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, left, right):
        return self.layer(torch.cat([left, right], dim=1))


def points(path):
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype="float32"))
    return table[:, :1], table[:, 1:2], table[:, 2:]
"""
OPENED = """
import json, sys
import cloudpickle, mlflow, numpy as np, pickle, torch

uri, model, out = sys.argv[1:]
mlflow.set_tracking_uri(uri)

def refused(*args, **kwargs):
    raise AssertionError("unpickled")

pickle.load = cloudpickle.load = torch.load = refused
found = mlflow.pyfunc.load_model(model)
left, right = np.float32([[0.25], [1.5], [-2.0]]), np.float32([[1.0], [0.5], [3.0]])
np.save(out, found.predict({"left": left, "right": right}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    """Three trials of a study in a file of its own, of which nothing is left but the home."""
    place = tmp_path_factory.mktemp("own")
    rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    np.savetxt(place / "points.csv", rows, delimiter=",")
    (place / "study.py").write_text(STUDY)
    (place / "promoted_net.py").write_text(NET)
    at = Home.at(place / "home")
    arguments = ["--study", str(place / "study.py"), "-o", f"data.path={place / 'points.csv'}", "--trials", "3"]
    arguments += ["--executor", "inline", "--home", str(at.root)]
    subprocess.run([sys.executable, "-m", "hpo", "run", *arguments], check=True, capture_output=True)
    return at


def invoked(home: Home, *arguments: str):
    return CliRunner().invoke(app, ["promote", *arguments, "--home", str(home.root)])


def promoted(home: Home, *arguments: str) -> dict:
    result = invoked(home, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def refusal(home: Home, *arguments: str, code: int = 2) -> str:
    result = invoked(home, *arguments)
    assert result.exit_code == code, result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("error: ")]
    return line


def versions(home: Home, name: str) -> dict[str, list[str]]:
    """Version -> its aliases."""
    found = MlflowClient(home.tracking_uri).search_model_versions(f"name = '{name}'")
    client = MlflowClient(home.tracking_uri)
    return {str(one.version): client.get_model_version(name, str(one.version)).aliases for one in found}


def events(home: Home, name: str) -> list[bool]:
    """Of each promotion of the model that is recorded, whether it is one that was taken back."""
    from hpo.ledger.views import report as report_queries

    with Ledger(home.storage, create=False).read() as connection:
        rows = report_queries.study_events(connection, queries.study_row(connection, "fit").id, ["promotion"])
    return [row.fields["undone"] for row in rows if row.fields["name"] == name]


def test_a_promoted_model_predicts_what_load_model_does(home, tmp_path):
    """Bit by bit, in another process that has neither the study's files nor its data, and without a pickle."""
    done = promoted(home, "--name", "opened")
    assert done["trial"] == hpo.open(home=home.root).best["number"] and done["uri"] == "models:/opened@champion"
    assert (done["version"], done["before"], done["told"]) == ("1", None, "")
    model = hpo.open(home=home.root).load_model()
    with torch.no_grad():
        left, right = torch.tensor([[0.25], [1.5], [-2.0]]), torch.tensor([[1.0], [0.5], [3.0]])
        wanted = model(left, right).numpy()
    away = [home.root.parent / name for name in ("study.py", "promoted_net.py", "points.csv")]
    for path in away:
        path.rename(tmp_path / path.name)
    try:
        arguments = [home.tracking_uri, done["uri"], str(tmp_path / "out.npy")]
        script = tmp_path / "opened.py"
        script.write_text(OPENED)
        subprocess.run([sys.executable, str(script), *arguments], check=True, cwd=tmp_path / "..")
    finally:
        for path in away:
            (tmp_path / path.name).rename(path)
    assert np.array_equal(np.load(tmp_path / "out.npy"), wanted)


def test_a_version_says_what_its_checkpoint_was_measured_by():
    kept = KeptCheckpoint("fit", 3, 10, 1, Path("c"), "0", DISK, {}, "")
    measured = [Point("val/loss", 10, 0, 0.31), Point("train/loss", 10, 0, 0.2)]
    assert facts(study_row(name="fit"), ["val/loss"], kept, measured) == "Trial 3 of study fit, epoch 1: val/loss 0.31"


def test_a_promoted_model_is_linked_to_its_run_metrics_and_signature(home):
    done = promoted(home, "1", "--name", "linked")
    client = MlflowClient(home.tracking_uri)
    version = client.get_model_version_by_alias("linked", "champion")
    assert version.run_id == done["run_id"] and version.tags["hpo.trial"] == "1"
    assert version.description.startswith("Trial 1 of study fit, epoch 2: val/loss ")
    experiment = client.get_run(version.run_id).info.experiment_id
    [model] = [one for one in client.search_logged_models([experiment]) if one.name == done["model"]]
    assert version.source == model.artifact_location and model.source_run_id == version.run_id
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "linked", "version": 1}]
    values = {metric.key: metric.value for metric in model.metrics}
    assert values["val/loss"] == hpo.open(home=home.root).trial(1)["values"]["val/loss"]
    mlflow.set_tracking_uri(home.tracking_uri)
    signature = mlflow.models.get_model_info("models:/linked@champion").signature
    assert {one.name: (str(one.type), one.shape) for one in signature.inputs} == {
        "left": ("float32", (-1, 1)),
        "right": ("float32", (-1, 1)),
    }
    assert verify(home, home.storage, home.tracking_uri).differences == []


def test_data_sets_are_logged_with_their_digests(home):
    client = MlflowClient(home.tracking_uri)
    digest = sha256(home.root.parent / "points.csv")
    runs = client.search_runs([client.get_experiment_by_name("fit").experiment_id])
    for run in runs:
        [found] = run.inputs.dataset_inputs
        assert (found.dataset.name, found.dataset.digest) == ("points.csv", digest[:16])
        assert json.loads(found.dataset.profile)["sha256"] == digest
    assert len(runs) == 4


def test_a_data_set_that_mlflow_has_instead_is_a_difference(home):
    client = MlflowClient(home.tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name("fit").experiment_id])
    with closing(sqlite3.connect(home.root / "mlflow.db")) as rows, rows:
        rows.execute("UPDATE datasets SET digest = 'other'")
    try:
        found = verify(home, home.storage, home.tracking_uri).differences
    finally:
        with closing(sqlite3.connect(home.root / "mlflow.db")) as rows, rows:
            rows.execute("UPDATE datasets SET digest = ?", (sha256(home.root.parent / "points.csv")[:16],))
    assert len(found) == len(runs)
    assert all("MLflow has the data sets [('points.csv', 'other')], the ledger [('points.csv'" in one for one in found)


@pytest.mark.parametrize("name", ["deleted", "the team's model"])
def test_a_version_deleted_in_mlflow_is_a_difference_until_undone(home, name):
    for _ in range(2):
        assert promoted(home, "0", "--name", name)["version"] == "1"
    MlflowClient(home.tracking_uri).delete_model_version(name, "1")
    [found] = verify(home, home.storage, home.tracking_uri).differences
    assert f"fit: trial 0 is promoted to version 1 of model {name}, which is not in MLflow" in found
    _, *undo = shlex.split(found.split("`")[1])
    assert CliRunner().invoke(app, [*undo, "--home", str(home.root)]).exit_code == 0
    assert verify(home, home.storage, home.tracking_uri).differences == []


def test_promoting_twice_makes_one_version(home):
    first = promoted(home, "0", "--name", "twice")
    assert promoted(home, "0", "--name", "twice") == first | {"before": "1"}
    assert "already is version 1 of model twice" in invoked(home, "0", "--name", "twice").output
    promoted(home, "0", "--name", "twice", "--alias", "challenger")
    assert {key: sorted(names) for key, names in versions(home, "twice").items()} == {"1": ["challenger", "champion"]}
    assert events(home, "twice") == [False, False]


def test_taken_back_the_alias_stands_for_what_it_did_before(home):
    """Step by step, until nothing is left; an alias that somebody has moved stays where it is."""
    for number in ("0", "1", "2"):
        promoted(home, number, "--name", "back")
    assert versions(home, "back") == {"3": ["champion"], "2": [], "1": []}
    assert promoted(home, "--undo", "--name", "back", "--dry-run")["trial"] == 2
    assert promoted(home, "--undo", "--name", "back")["trial"] == 2
    assert versions(home, "back") == {"2": ["champion"], "1": []}
    MlflowClient(home.tracking_uri).set_registered_model_alias("back", "champion", "1")
    assert promoted(home, "--undo", "--name", "back")["trial"] == 1
    assert versions(home, "back") == {"1": ["champion"]}
    promoted(home, "--undo", "--name", "back")
    assert not MlflowClient(home.tracking_uri).search_registered_models("name = 'back'")
    assert "there is nothing to take back" in refusal(home, "--undo", "--name", "back")
    assert verify(home, home.storage, home.tracking_uri).differences == []


def test_what_is_promoted_is_told_and_its_run_stays(home):
    promoted(home, "1", "--name", "told")
    label = "models:/told@champion, version 1"
    shown = CliRunner().invoke(app, ["show", "1", "--home", str(home.root)]).stdout
    assert f"promoted as {label}\n" in shown
    told = data.read(Ledger(home.storage, create=False), home, "fit").answer
    assert {"trial": 1, "label": label} in told["promoted"]
    result = CliRunner().invoke(app, ["rm", "--study", "fit", "--yes", "--home", str(home.root)])
    assert result.exit_code == 2 and label in result.stderr and "promote --undo --study fit" in result.stderr
    promoted(home, "--undo", "--name", "told")
    assert label not in CliRunner().invoke(app, ["show", "1", "--home", str(home.root)]).stdout


@pytest.mark.parametrize("point", ["promote.after_model", "promote.after_version", "promote.after_event"])
def test_killed_it_is_completed_or_undone_by_the_next_call(home, point):
    name = point.replace(".", "-")
    killed(home, point, "2", "--name", name)
    promoted(home, "2", "--name", name)
    assert versions(home, name) == {"1": ["champion"]} and events(home, name) == [False]
    killed(home, "promote.after_undone_alias", "--undo", "--name", name)
    promoted(home, "--undo", "--name", name)
    assert versions(home, name) == {} and events(home, name) == [False, True]


def killed(home: Home, point: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "hpo", "promote", *arguments, "--home", str(home.root)]
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{point}=kill@1"}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL


FUNCTION = """
import hpo


@hpo.study(space={"lr": hpo.Float(0.1, 1.0)}, minimize="val/loss")
def train(trial):
    trial.report(1, {"val/loss": trial.params.lr})
"""


def test_a_function_that_saves_nothing_is_told_how_it_would(tmp_path):
    (tmp_path / "saveless.py").write_text(FUNCTION)
    at = tmp_path / "home"
    hpo.run(f"{tmp_path / 'saveless.py'}", trials=1, home=at, executor="inline", progress=False)
    assert "have the code call trial.save(files) before trial.report" in refusal(Home.at(at))


def test_what_cannot_be_promoted_is_refused_in_a_sentence(home, tmp_path):
    assert "--name 'a/b' is refused by MLflow: Invalid model name" in refusal(home, "--name", "a/b")
    assert "'latest' alias name" in refusal(home, "--alias", "latest")
    assert "has no trial 99: it has trials 0 to 2" in refusal(home, "99")
    away = refusal(home, "--tracking-uri", "http://127.0.0.1:9", code=1)
    assert "MLflow at http://127.0.0.1:9 does not answer now" in away
    bare = Home.at(tmp_path / "bare")
    shutil.copytree(home.root, bare.root)
    shutil.rmtree(bare.root / "checkpoints")
    assert "checkpoint" in refusal(bare, code=1)
    assert "a new version of model dry: models:/dry@champion\n" in invoked(home, "--name", "dry", "--dry-run").output
    assert not MlflowClient(home.tracking_uri).search_registered_models("name = 'dry'")
