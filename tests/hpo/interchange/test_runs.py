"""Runs of MLflow, of Weights & Biases and of Ray Tune, as released libraries left them, and damaged ones."""

from __future__ import annotations

import json
import math
import sqlite3
import sys

import pytest

from hpo.errors import UserError


@pytest.mark.parametrize("name", ["mlflow-3.17.2.db.xz", "mlflow-3.17.2-mlruns.tar.xz"])
def test_runs_of_an_mlflow_experiment(asset, brought, name):
    source = asset(name)
    before = source.read_bytes() if source.is_file() else sorted(source.rglob("*"))
    found = brought("mlflow", source, metrics=["val/loss"])
    assert [trial.state for trial in found.trials] == ["complete", "complete", "failed"]
    assert found.trials[0].params == {"lr": 0.1, "optimizer": "adam", "layers": 2, "amp": True}
    assert found.trials[1].values == [0.03]
    assert found.curves[0] == {
        "val/loss": [(0, 0.1), (1, 0.2), (2, 0.30000000000000004)],
        "train/loss": [(0, 0.1), (1, 0.1), (2, 0.1)],
        "seen": [(0, 1.0), (1, 2.0), (2, 3.0)],  # logged without steps
    }
    assert math.isnan(found.curves[1]["train/loss"][1][1])
    assert (found.trials[1].started_at, found.trials[1].ended_at) == (1_700_000_001.0, 1_700_000_001.5)
    assert found.done.left[0] == "1 run in state RUNNING, which may end yet"
    assert before == (source.read_bytes() if source.is_file() else sorted(source.rglob("*")))
    assert brought("mlflow", source, metrics=["val/loss"]).done.added == 0


def test_a_database_of_mlflow_whatever_is_in_its_name(asset, brought, tmp_path):
    place = tmp_path / "which?" / "50%41#.db"
    place.parent.mkdir()
    asset("mlflow-3.17.2.db.xz").rename(place)
    assert brought("mlflow", place, metrics=["val/loss"]).done.added == 3


def test_what_mlflow_does_not_have(asset, brought, home, tmp_path):
    database = asset("mlflow-3.17.2.db.xz")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE x (y)").connection.close()
    (tmp_path / "text").write_text("no database")
    for source, given, said in (
        (database, {}, r"does not say by which metric .*\(it has seen, train/loss, val/loss\): name it by --metric"),
        (database, {"metrics": ["val/los"]}, r"--metric val/los: no trial of .* has reported it; it has seen"),
        (database, {"study": "digit sweep"}, r"has no experiment 'digit sweep' .*; did you mean 'digits sweep'"),
        (database, {"metrics": ["val/loss"], "directions": ["down"]}, "--direction down: give minimize or maximize"),
        (database, {"metrics": ["seen"], "directions": ["minimize", "maximize"]}, "--direction is given 2 times"),
        (tmp_path / "none", {}, "is not a directory of MLflow runs"),
        (tmp_path / "other.db", {}, "is a database, but not one of MLflow's"),
        (tmp_path / "text", {}, "cannot be read as a store of MLflow's .*not a database"),
        ("http://127.0.0.1:9", {"metrics": ["x"]}, "cannot be read as a store of MLflow's"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            brought("mlflow", source, **given)
        assert "\n" not in str(raised.value)
    assert not home.root.exists()


def test_offline_runs_of_wandb(asset, brought):
    source = asset("wandb-0.31.0.tar.xz")
    found = brought("wandb", source, metrics=["val/loss"])
    assert found.done.name == "digits"
    assert [trial.state for trial in found.trials] == ["complete", "complete", "failed"]
    assert found.trials[0].params == {"lr": 0.1, "optimizer": "adam", "model.layers": 2}
    assert found.curves[0]["val/loss"] == [(0, 0.1), (1, 0.2), (2, 0.30000000000000004)]
    assert math.isnan(found.curves[0]["odd"][1][1]) and "epoch" not in found.curves[0]
    assert [trial.epoch for trial in found.trials] == [2, 2, 2]
    assert found.trials[2].error == "it ended with exit code 1"
    assert found.trials[0].ended_at > found.trials[0].started_at > 1_700_000_000
    assert brought("wandb", source, metrics=["val/loss"]).done.added == 0


def test_a_wandb_log_that_is_cut_off_or_damaged(asset, brought, home):
    """A run that was killed has not ended; a flipped byte is found by the checksum."""
    source = asset("wandb-0.31.0.tar.xz")
    cut, torn, whole = sorted(source.rglob("*.wandb"))
    content = torn.read_bytes()
    cut.write_bytes(cut.read_bytes()[:-10])
    found = brought("wandb", source, metrics=["val/loss"], name="cut")
    assert len(found.trials) == 2 and found.done.left[0] == "1 run without an end, which may run still"
    torn.write_bytes(content[:400] + bytes([content[400] ^ 1]) + content[401:])
    with pytest.raises(UserError, match=rf"{torn.name} is damaged at byte \d+: its checksum does not fit; restore"):
        brought("wandb", source, metrics=["val/loss"], name="torn")
    torn.write_bytes(b"text")
    with pytest.raises(UserError, match="is not a wandb log"):
        brought("wandb", torn, metrics=["val/loss"])
    with pytest.raises(UserError, match="has no project 'digit'"):
        brought("wandb", whole, study="digit")
    with pytest.raises(UserError, match=r"holds no run-ID\.wandb"):
        brought("wandb", source.parent / "nowhere")


def test_wandb_that_is_not_installed_names_the_extra(asset, brought, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb.proto", None)
    with pytest.raises(UserError, match=r"needs wandb to be read: pip install 'hpo\[wandb\]'"):
        brought("wandb", asset("wandb-0.31.0.tar.xz"), metrics=["val/loss"])


def test_results_of_ray_tune(asset, brought):
    """Ray is not imported for it."""
    imported = "ray" in sys.modules
    source = asset("ray-2.60.0.tar.xz")
    found = brought("ray", source, metrics=["val_loss"], name="sweep")
    assert imported or "ray" not in sys.modules
    by = {trial.params["optimizer"]: trial for trial in found.trials}
    assert {name: trial.state for name, trial in by.items()} == {
        "adam": "complete",
        "sgd": "complete",
        "bad": "failed",
        "late": "pruned",
    }
    assert by["adam"].params == {"lr": 0.1, "model.layers": 2, "optimizer": "adam"}
    assert by["bad"].error == "ValueError: this optimizer diverges"
    curves = found.curves[by["adam"].number]
    assert [step for step, _ in curves["val_loss"]] == [1, 2, 3] and set(curves) == {"val_loss", "nested/accuracy"}
    assert by["adam"].ended_at > by["adam"].started_at
    assert "1 trial with fewer than 3 iterations were stopped by a scheduler" in found.done.guessed


def test_results_of_ray_tune_that_are_damaged(asset, brought, home):
    source = asset("ray-2.60.0.tar.xz")
    [state] = source.glob("experiment_state-*.json")
    result = next(source.glob("*adam*/result.json"))
    with pytest.raises(UserError, match=f"name one of those in it, {source.name}"):
        brought("ray", source.parent)
    with result.open("a") as file:
        file.write('{"val_loss": 0.1,\n')
    with pytest.raises(UserError, match=r"result\.json:4 is damaged \(.*\): restore it from a backup"):
        brought("ray", source, metrics=["val_loss"])
    state.write_text(json.dumps({"checkpoints": []}))
    with pytest.raises(UserError, match="is not as Ray Tune 2 writes it"):
        brought("ray", source, metrics=["val_loss"])
    state.write_text("[1")
    with pytest.raises(UserError, match="is damaged"):
        brought("ray", source, metrics=["val_loss"])
    assert not home.root.exists()


def test_a_run_of_mlflow_that_cannot_be_read_is_left_out_or_named(asset, brought, capfd):
    """MLflow leaves out what it calls malformed, with a traceback; what it cannot parse ends its search."""
    source = asset("mlflow-3.17.2-mlruns.tar.xz")
    [meta, other, *_] = sorted(source.glob("*/*/meta.yaml"))
    text = other.read_text()
    meta.write_text(meta.read_text().replace("experiment_id: '", "experiment_id: '9"))
    found = brought("mlflow", source, metrics=["val/loss"])
    [left] = [left for left in found.done.left if left.startswith("what MLflow leaves out")]
    assert f"recorded for run '{meta.parent.name}'" in left and found.done.added in (2, 3)
    other.write_text("run_id: [\n")
    with pytest.raises(UserError, match=rf"cannot be read as a store of MLflow's .*{other.parent.name}/meta\.yaml"):
        brought("mlflow", source, metrics=["val/loss"], name="damaged")
    other.write_text(text.replace("start_time: 1", "start_time: x1"))
    with pytest.raises(UserError, match=r"cannot be read as a store of MLflow's \(TypeError: "):
        brought("mlflow", source, metrics=["val/loss"], name="damaged")
    assert "Traceback" not in "".join(capfd.readouterr())
