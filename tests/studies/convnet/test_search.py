"""The convnet study from the command line: killed and resumed it is the uninterrupted one, and bad data is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.storage.home import Home
from studies.convnet import recipes

pytestmark = pytest.mark.whole

TINY = {
    "data.pictures.num_train": 40,
    "data.pictures.size": 8,
    "data.num_val": 20,
    "data.test": True,
    "model.width": 8,
    "model.dropout": 0.1,
    "augment.mixup": 0.3,
    "augment.erase": 0.5,
    "train.optim.wrap": "sam",
    "train.batch_size": 16,
    "train.micro_batch_size": 8,
    "train.num_epochs": 2,
    "train.precision": "bf16",
}
OPTIONS = [word for path, value in TINY.items() for word in ("-o", f"{path}={value}")]
RUN = ("run", "--study", "convnet", "--trials", "2", "--executor", "inline", "--sampler", "random", *OPTIONS)


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def status(home: Home) -> dict:
    return json.loads(hpo("status", "--study", "convnet", "--json", home=home).stdout)


@pytest.mark.usefixtures("process")
def test_killed_and_resumed_it_ends_as_the_uninterrupted_study(tmp_path):
    whole, broken = Home.at(tmp_path / "whole"), Home.at(tmp_path / "broken")
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@1"}
    command = [sys.executable, "-m", "hpo", *RUN, "--home", str(broken.root)]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    resumed = hpo("resume", "--executor", "inline", home=broken)
    assert resumed.exit_code == 0, resumed.output
    ran = hpo(*RUN, home=whole)
    assert ran.exit_code == 0, ran.output
    assert status(broken)["digest"] == status(whole)["digest"]
    verified = hpo("verify", home=broken)
    assert verified.exit_code == 0, verified.output
    curves = json.loads(hpo("show", "0", "--json", home=whole).stdout)["curves"]
    assert {"val/accuracy", "val/loss", "test/accuracy", "test/loss"} <= curves.keys()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("data.path=/no/such/directory", "data.path"),
        ("loss.name=hinge", "loss.name"),
        ("augment.mixup=-1", "augment.mixup"),
        ("data.num_val=3", "data.num_val"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_written(home, option, sentence):
    result = hpo("run", "--study", "convnet", "--trials", "1", "-o", option, home=home)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ") and sentence in line
    assert not home.root.exists()


def test_folders_of_one_class_are_refused_before_anything_is_written(home, tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for n in range(3):
        Image.new("RGB", (32, 32), (n, 0, 0)).save(tmp_path / "photos" / "cat" / f"{n}.png")
    options = ("-o", f"data.path={tmp_path / 'photos'}", "-o", "data.num_val=10")
    result = hpo("run", "--study", "convnet", "--trials", "1", *options, home=home)
    assert result.exit_code == 2
    assert result.stderr.endswith("photos has one class, cat: give two or more folders.\n")
    assert not home.root.exists()


NO_RECIPE = json.dumps([{"state": "complete", "values.val/accuracy": 0.5}])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "is not JSON of trials"),
        ("[1]", "is not JSON of trials"),
        ("[]", "of the 0 trials that are read none"),
        (NO_RECIPE, "of the 1 trials that are read none"),
    ],
)
def test_a_table_of_recipes_without_trials_is_refused_with_what_to_pipe(given, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    with pytest.raises(SystemExit) as end:
        recipes.main()
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert end.value.code == 2 and words in line and "`hpo compare --study convnet-recipes" in line
    assert printed.out == ""


@pytest.mark.usefixtures("process")
def test_cifar_in_a_directory_is_trained_on_and_its_bytes_identify_it(tmp_path, home):
    directory = tmp_path / "cifar"
    directory.mkdir()
    records = np.random.default_rng(0).integers(0, 10, (40, 3073), dtype=np.uint8)
    for name, part in (("data_batch_1", records[:30]), ("test_batch", records[30:])):
        (directory / f"{name}.bin").write_bytes(part.tobytes())
    flags = ("run", "--study", "convnet", "--executor", "inline", "-o", f"data.path={directory}", "-o", "preset=cifar")
    small = ("data.num_val=10", "model.width=8", "model.num_blocks=1", "train.num_epochs=1", "train.batch_size=16")
    flags += tuple(word for option in small for word in ("-o", option))
    ran = hpo(*flags, "--trials", "1", home=home)
    assert ran.exit_code == 0, ran.output
    trial = json.loads(hpo("show", "0", "--json", home=home).stdout)
    assert (trial["state"], trial["step"]) == ("complete", 2)  # 20 of the 30 images in batches of 16
    batch = directory / "data_batch_1.bin"
    batch.write_bytes(bytes([(batch.read_bytes()[0] + 1) % 10]) + batch.read_bytes()[1:])
    changed = hpo(*flags, "--trials", "2", home=home)
    assert changed.exit_code == 2
    assert "data" in changed.stderr and "Traceback" not in changed.stderr
