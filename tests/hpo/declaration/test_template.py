"""`hpo init`: what it writes runs by the line it prints, and what it refuses leaves everything as it was."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.declaration.references import load
from hpo.declaration.study import Study

pytestmark = pytest.mark.whole


def hpo(*arguments: str, directory: Path, home: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hpo", *arguments]
    environment = os.environ | {"HPO_HOME": str(home)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("process")
def test_what_is_written_runs_by_the_line_that_is_printed(tmp_path):
    home = tmp_path / "home"
    written = hpo("init", "spirals", directory=tmp_path, home=home)
    assert written.returncode == 0, written.stderr
    program, *line = shlex.split(written.stdout.splitlines()[-1])
    assert (program, line) == ("hpo", ["run", "--study", "spirals.py", "--trials", "5"])
    ran = hpo(*line, directory=tmp_path, home=home)
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stdout + ran.stderr
    found = json.loads(hpo("status", "--json", directory=tmp_path, home=home).stdout)
    assert (found["study"], found["state"]) == ("spirals", "complete")
    assert found["trials"]["complete"] + found["trials"]["pruned"] == 5
    assert found["best"]["value"] > 0.5  # of three classes
    shown = json.loads(hpo("show", "0", "--json", directory=tmp_path, home=home).stdout)
    assert not [key for key in shown["curves"] if key.startswith("test/")]
    confirmed = hpo("confirm", "--top", "1", "--seeds", "1", "--json", directory=tmp_path, home=home)
    assert confirmed.returncode == 0, confirmed.stderr
    [row] = json.loads(confirmed.stdout)["rows"]
    assert row["held_out"]["mean"] > 0.5 and not row["failed"]
    verified = hpo("verify", directory=tmp_path, home=home)
    assert verified.returncode == 0, verified.stdout


def declared(here: Path, name: str) -> Study:
    assert CliRunner().invoke(app, ["init", name]).exit_code == 0
    return load(f"{here / name}.py")


def test_the_file_names_the_study_and_shows_what_a_study_can_have(here):
    study = declared(here, "waves")
    assert study.name == "waves"
    assert "my_study" not in (here / "waves.py").read_text()
    assert study.space.dimensions["train.optim.lr"].log
    assert study.space.dimensions["train.optim.momentum"].when == {"train.optim.name": "sgd"}
    for preset in study.presets:
        study.configure({"preset": preset})


def test_the_points_are_the_same_every_time_and_no_part_shares_one(here):
    study = declared(here, "points")
    task = study.task_class()
    parts = {name: task(study.config).split(name) for name in ("train", "val", "test")}
    again = task(study.config).split("val")
    assert all(a.equal(b) for a, b in zip(parts["val"], again, strict=True))
    points = [tuple(point) for x, _ in parts.values() for point in x.tolist()]
    assert len(set(points)) == len(points) == study.config.data.num_points


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my-study", "'my-study' is not a Python module name: .* such as 'my_study'"),
        ("waves.py", "'waves.py' is not a Python module name: .* such as 'waves'"),
        ("../waves", "'../waves' is not a Python module name: .* such as 'waves'"),
        ("class", "'class' is not a Python module name: .* such as 'my_study'"),
        ("", "'' is not a Python module name"),
        ("straße", "'straße' is not a Python module name"),
        ("_private", "study name '_private' cannot be used"),
        ("torch", "'torch' is a module already, which torch.py would hide"),
        ("mlp", "'mlp' is a study that comes along"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_sentence(here, name, sentence):
    result = CliRunner().invoke(app, ["init", name])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert re.match(f"error: {sentence}", line), line
    assert list(here.iterdir()) == []


def test_nothing_is_overwritten(here):
    (here / "waves.py").write_text("mine")
    result = CliRunner().invoke(app, ["init", "waves"])
    assert result.exit_code == 2
    assert result.stderr == "error: waves.py is here already and stays as it is: give another name.\n"
    assert (here / "waves.py").read_text() == "mine"


def test_a_directory_that_cannot_be_written_is_named(here):
    (here / "dangling.py").symlink_to(here / "no" / "such.py")
    result = CliRunner().invoke(app, ["init", "dangling"])
    assert result.exit_code == 2
    assert "dangling.py" in result.stderr
    [_] = result.stderr.splitlines()
