"""The quickstart from the command line: run, continue, interrupt, resume, look, train the best."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from places import ROOT
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.declaration.loading import source_parts
from hpo.declaration.references import load
from hpo.errors import UserError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.process_id import Process, start_time
from hpo.storage.home import Home
from trainer.errors import CheckpointError

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

FLAGS = ("--study", "mlp", "--executor", "inline", "--sampler", "random", "-o", "train.num_epochs=2")


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def status(home: Home, name: str = "mlp") -> dict:
    return json.loads(hpo("status", "--study", name, "--json", home=home).stdout)


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    """A home in which four trials of two epochs were run at once."""
    home = Home.at(tmp_path_factory.mktemp("searched") / "home")
    result = hpo("run", *FLAGS, "--trials", "4", home=home)
    assert result.exit_code == 0, result.output
    return home


def test_a_search_leaves_everything_in_its_home(searched):
    found = status(searched)
    assert found["state"] == "complete"
    assert found["trials"]["complete"] == found["requested"] == 4
    assert found["epochs_trained"] == 8
    assert found["attempts"] == 4
    assert 0.2 < found["best"]["value"] <= 1  # chance is 0.1
    assert {path.name for path in searched.root.iterdir()} >= {"ledger.db", "mlflow.db", "artifacts", "checkpoints"}
    verified = hpo("verify", home=searched)
    assert verified.exit_code == 0, verified.output
    assert re.match("0 differences; checked .*4 trials", verified.stdout)
    synced = hpo("sync", home=searched)
    assert synced.exit_code == 0
    assert "MLflow has everything" in synced.stdout


def test_a_trial_that_ended_says_so_in_metrics_json(searched):
    trial = json.loads(hpo("show", "1", "--json", home=searched).stdout)
    place = searched.checkpoints("mlp", 1)
    metrics = json.loads((place / "metrics.json").read_text())
    assert (metrics["trial"], metrics["state"], metrics["epoch"], metrics["step"]) == (1, "complete", 2, trial["step"])
    assert metrics["objective"] == trial["values"]
    assert metrics["metrics"] == {key: curve[-1][2] for key, curve in trial["curves"].items()}
    [best] = [one for one in trial["checkpoints"] if one["best"]]
    assert place / metrics["best"]["checkpoint"] == Path(best["path"])
    assert metrics["best"]["metrics"]["val/accuracy"] == max(value for _, _, value in trial["curves"]["val/accuracy"])
    [sent] = [path for path in searched.artifacts.rglob("metrics.json") if '"trial": 1,' in path.read_text()]
    assert (sent.parent / json.loads(sent.read_text())["best"]["checkpoint"] / "model.safetensors").is_file()


def test_a_checkpoint_opens_from_mlflow_as_a_model(searched, tmp_path):
    """The model in MLflow has the metrics of its step, and what is downloaded predicts as the checkpoint does."""
    import mlflow
    import torch

    from studies.mlp.task import MlpTask

    study = load("mlp")
    client = mlflow.MlflowClient(searched.tracking_uri)
    experiment = client.get_experiment_by_name("mlp")
    assert experiment is not None
    found = client.search_logged_models(
        [experiment.experiment_id], "tags.`hpo.trial` = '1' AND tags.`hpo.best` = 'true'"
    )
    [model] = found
    trial = json.loads(hpo("show", "1", "--json", home=searched).stdout)
    [best] = [one for one in trial["checkpoints"] if one["best"]]
    curve = {step: value for step, _, value in trial["curves"]["val/accuracy"]}
    assert {m.key: m.value for m in model.metrics}["val/accuracy"] == curve[best["step"]]
    mlflow.set_tracking_uri(searched.tracking_uri)
    path = Path(mlflow.artifacts.download_artifacts(f"models:/{model.model_id}", dst_path=str(tmp_path)))
    opened = study.load_model(path)
    assert not opened.training
    with torch.no_grad():
        task = MlpTask(study.rebuild(trial["config"], trial["config_hash"]))
        assert task.evaluate(opened)["val/accuracy"] == curve[best["step"]]
    run = Path(client.get_run(model.source_run_id).info.artifact_uri) / f"checkpoints/step-{best['step']:08d}"
    for one in (study.load_model(run), study.load_model(Path(best["path"]), task.config)):
        for name, value in one.state_dict().items():
            assert torch.equal(value, opened.state_dict()[name])
    with pytest.raises(UserError, match=r"no config\.json"):
        study.load_model(Path(best["path"]))
    (path / "model.safetensors").write_bytes(b"not it")
    with pytest.raises(CheckpointError, match="bytes instead of"):
        study.load_model(path)


def test_every_epoch_reports_what_the_study_declares(searched):
    trial = json.loads(hpo("show", "0", "--json", home=searched).stdout)
    assert not [key for key in trial["curves"] if key.startswith("test/")]
    for key in ("train/loss", "val/loss", "val/accuracy"):
        assert [epoch for _, epoch, _ in trial["curves"][key]] == [1, 2], key
    assert trial["values"]["val/accuracy"] == trial["curves"]["val/accuracy"][-1][2]
    shown = hpo("show", "0", home=searched).stdout
    assert re.search(r"train\.batch_size +\d+ +default 32", shown)


def test_more_trials_later_are_the_study_that_was_run_at_once(searched, home):
    assert hpo("run", *FLAGS, "--trials", "1", home=home).exit_code == 0
    result = hpo("run", *FLAGS, "--trials", "4", home=home)
    assert "1 of them done before" in result.stdout
    complete = status(home)
    assert complete["digest"] == status(searched)["digest"]
    assert hpo("resume", "--executor", "inline", home=home).exit_code == 0
    assert status(home) == complete


def test_another_driver_is_named_and_exits_3(searched):
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ledger = Ledger(searched.storage)
        with ledger.read() as connection:
            study = queries.study_row(connection, "mlp").id
        me = Process.current()
        other = Process(me.host, sleeper.pid, start_time(sleeper.pid) or "")
        lease = leases.acquire(ledger, f"driver:{study}", "s", other, SystemClock(), 1.0)
        result = hpo("resume", "--executor", "inline", home=searched)
        assert result.exit_code == 3
        assert re.search(rf"^error: .*host {me.host}, pid {sleeper.pid}, since 20", result.stderr, re.MULTILINE)
        assert status(searched)["state"] == "complete", "who is refused changes nothing"
        lease.release()
        ledger.close()
    finally:
        sleeper.communicate(b"\n")


def test_interrupted_and_resumed_equals_uninterrupted(searched, home):
    command = [sys.executable, "-m", "hpo", "run", *FLAGS, "--trials", "4", "--home", str(home.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_reports(home)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "hpo resume --study mlp" in out
    assert "Traceback" not in err
    between = status(home)
    assert between["state"] == "interrupted"
    assert between["trials"]["running"] == 0
    result = hpo("resume", "--executor", "inline", home=home)
    assert result.exit_code == 0, result.output
    after = status(home)
    assert after["digest"] == status(searched)["digest"]
    assert after["epochs_trained"] == 8
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output


def test_a_second_ctrl_c_leaves_at_once_and_the_study_resumes(searched, home):
    slow = tuple("train.num_epochs=4000" if flag == "train.num_epochs=2" else flag for flag in FLAGS)
    slow = (*slow, "-o", "train.checkpoint.every_epochs=4000")
    command = [sys.executable, "-m", "hpo", "run", *slow, "--trials", "1", "--home", str(home.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_reports(home)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 20
    assert status(home)["state"] == "interrupted"


def wait_for_reports(home: Home) -> None:
    """Until the first epoch of a trial is committed."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            with closing(sqlite3.connect(f"file:{home.root}/ledger.db?mode=ro", uri=True)) as connection:
                if connection.execute("SELECT count(*) FROM reports").fetchone()[0]:
                    return
        except sqlite3.OperationalError:
            pass  # no such file, or no such table yet
        time.sleep(0.02)
    raise AssertionError("no epoch was trained in 90 s")


def test_the_best_configuration_trains_as_it_is(searched, tmp_path):
    best = json.loads(hpo("best", "--json", "--to", str(tmp_path / "best.yaml"), home=searched).stdout)
    assert os.path.isdir(best["checkpoint"])
    arguments = ("--study", "mlp", "--name", "mlp-best", "--trials", "1", "--config", str(tmp_path / "best.yaml"))
    result = hpo("run", *arguments, "--executor", "inline", "--strategy", "none", home=searched)
    assert result.exit_code == 0, result.output
    original = json.loads(hpo("show", str(best["number"]), "--study", "mlp", "--json", home=searched).stdout)
    again = json.loads(hpo("show", "0", "--study", "mlp-best", "--json", home=searched).stdout)
    assert again["params"] == {}
    assert again["config"] == original["config"]
    assert again["curves"]["val/accuracy"] == original["curves"]["val/accuracy"]


LOOSE = """
from dataclasses import replace

from hpo import Choice, Int
from hpo.space.space import Space
from studies.mlp import STUDY

space = {
    "train.optim.name": Choice(["adamw", "ranger"]),
    "train.optim.wrap": Choice(["none", "lookahead"]),
    "train.optim.lookahead.k": Int(2, 9),
    "train.rollback.max_rollbacks": Int(1, 4),
}
STUDY = replace(STUDY, name="loose", space=Space(space), enqueue=[{enqueued}])
"""


@pytest.mark.parametrize("chosen", [("adamw", "none"), pytest.param(("ranger", "lookahead"), marks=pytest.mark.slow)])
def test_the_best_configuration_trains_though_nothing_reads_parts_of_it(home, tmp_path, monkeypatch, chosen):
    params = dict(zip(("train.optim.name", "train.optim.wrap"), chosen, strict=True))
    params |= {"train.optim.lookahead.k": 6, "train.rollback.max_rollbacks": 1}
    (tmp_path / "loose.py").write_text(LOOSE.replace("{enqueued}", repr(params)))
    monkeypatch.chdir(tmp_path)
    once = ("--trials", "1", "--executor", "inline")
    result = hpo("run", "--study", "loose.py", *once, "-o", "train.num_epochs=1", home=home)
    assert result.exit_code == 0, result.output
    line = hpo("best", home=home).stdout.splitlines()[-1].removeprefix("train it: ")
    for command in line.split(" && "):
        result = CliRunner().invoke(app, [*shlex.split(command)[1:], *(once[2:] if " run " in command else ())])
        assert result.exit_code == 0, result.output
    original, again = (
        json.loads(hpo("show", "0", "--study", name, "--json", home=home).stdout) for name in ("loose", "loose-best")
    )
    assert original["params"] == params and again["params"] == {}
    for same in ("config", "config_hash", "values"):
        assert again[same] == original[same]


def test_the_default_configuration_learns_the_digits(home, tmp_path):
    pinned = {"train": {"optim": {"name": "adamw", "lr": 0.003}, "batch_size": 32, "num_epochs": 15}}
    pinned |= {"model": {"hidden_size": 64, "num_layers": 1, "dropout": 0.1}, "data": {"test": True}}
    (tmp_path / "pinned.yaml").write_text(yaml.safe_dump(pinned))
    arguments = ("--study", "mlp", "--trials", "1", "--executor", "inline", "--config", str(tmp_path / "pinned.yaml"))
    result = hpo("run", *arguments, home=home)
    assert result.exit_code == 0, result.output
    assert status(home)["best"]["value"] > 0.95
    test_accuracy = json.loads(hpo("show", "0", "--json", home=home).stdout)["curves"]["test/accuracy"][-1][2]
    assert test_accuracy > 0.93


def test_momentum_is_searched_with_sgd_alone(searched):
    rows = json.loads(hpo("compare", "--study", "mlp", "--json", home=searched).stdout)
    assert {row["params.train.optim.name"] for row in rows} == {"sgd", "adamw"}
    for row in rows:
        assert (row["params.train.optim.momentum"] is not None) == (row["params.train.optim.name"] == "sgd")


def test_the_split_is_fixed_disjoint_and_complete():
    import torch

    from studies.mlp.data import digits

    parts = digits(0)
    assert [len(y) for _, y in parts.values()] == [1077, 360, 360]
    rows = torch.cat([torch.cat([x, y[:, None].float()], dim=1) for x, y in parts.values()])
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    everything = torch.cat([torch.from_numpy(pixels / 16).float(), torch.from_numpy(classes)[:, None].float()], dim=1)
    assert torch.equal(rows.unique(dim=0), everything.unique(dim=0))
    assert not torch.equal(digits(1)["val"][0], parts["val"][0])


GUIDE = (ROOT / "docs" / "guide" / "first-study.md").read_text(encoding="utf-8")


def test_the_study_of_the_guide_runs(home, tmp_path):
    code = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert code is not None
    (tmp_path / "sine.py").write_text(code[1])
    flags = ("--study", str(tmp_path / "sine.py"), "--trials", "3", "--executor", "inline", "--strategy", "none")
    assert hpo("run", *flags, home=home).exit_code == 0
    found = status(home, "sine")
    assert found["trials"]["complete"] == 3
    assert found["best"]["value"] < 0.5  # predicting 0 everywhere costs 0.52


@pytest.mark.parametrize("name", ["atft", "bert", "convnet", "dpo", "gpt", "lora", "mlp", "online", "t5"])
def test_a_study_that_comes_along_may_be_copied_as_the_guide_says(name, home, tmp_path):
    """All that the copy stands on is the copy, and what studies share; the lines of the guide run as they stand."""
    lines = re.search(r"^cp -r (?:.*\n)*?(?=```)", GUIDE, re.MULTILINE)
    assert lines is not None
    copying, running = lines[0].replace("mlp", name).rsplit("hpo ", 1)
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    subprocess.run(["bash", "-ec", copying], cwd=tmp_path, check=True)
    assert {*source_parts(tmp_path / "mine.py")} - {"studies._lm"} == {"", "digits"}
    if name != "mlp":
        return
    command = [sys.executable, "-m", "hpo", *running.split(), "--executor", "inline", "-o", "train.num_epochs=1"]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | {"HPO_HOME": str(home.root)}, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert status(home, "mine")["trials"]["complete"] == 5
