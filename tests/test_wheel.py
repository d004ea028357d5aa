"""The wheel, installed outside the clone with and without PyTorch: what a user has who clones nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from places import ROOT

import hpo

pytestmark = pytest.mark.usefixtures("process")

PACKAGES = ("hpo", "trainer", "studies")
FUNCTION = """
import json

import hpo


@hpo.study(space={"lr": hpo.Float(1e-3, 1.0, log=True)}, minimize="loss")
def tuned(trial):
    before = trial.resume()
    weight = json.loads((before / "weight.json").read_text()) if before else 0.0
    for epoch in range(trial.epoch + 1, 4):
        weight += trial.params.lr * (1.0 - weight)
        (trial.directory / "weight.json").write_text(json.dumps(weight))
        trial.save(trial.directory / "weight.json")
        if trial.report(epoch, {"loss": (0.5 - weight) ** 2}):
            return
"""
COMMAND = """
command: "{python} program.py {x}"
space:
  x: {type: float, low: 0.0, high: 1.0}
minimize: loss
"""
PROGRAM = """
import sys

from hpo.client import trial

trial.report(1, {"loss": float(sys.argv[1])})
"""
NO_TORCH = "PyTorch, which is not installed: pip install 'hpo[train]'."

Hpo = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources, since setuptools writes beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", ".", cwd=source)
    [built] = (source / "dist").iterdir()
    return built


def pip(python: str | Path, *words: str, cwd: Path | None = None) -> None:
    ran = subprocess.run([python, "-m", "pip", *words], cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def linked(wheel: Path, place: Path, *, torch: bool) -> Path:
    """An environment with the wheel alone; what it needs are links to what runs the tests, with torch or without."""
    shown = place / "shown"
    shown.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        hidden = ("hpo", "__editable__", *(() if torch else ("torch",)))
        if not path.name.startswith(hidden):
            (shown / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
    pip(sys.executable, "--python", str(place / "env"), "install", "--no-deps", "--no-index", str(wheel))
    [site] = place.glob("env/lib/python*/site-packages")
    (site / "shown.pth").write_text(f"{shown}\n")
    return place / "env"


def caller(environment: Path, directory: Path) -> Hpo:
    """Runs `hpo` of this environment in a directory, as a shell would that knows nothing of the clone."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [environment / "bin" / "hpo", *words]
        return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=600)

    return run


def ended(ran: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command has ended well and said these words."""
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for word in words:
        assert word in ran.stdout, ran.stdout + ran.stderr


def refused(ran: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, f"error: {sentence}"), ran.stdout + ran.stderr


def search_without_torch(run: Hpo, directory: Path) -> None:
    """Functions and commands are searched, saved and looked at; what needs torch names the extra."""
    (directory / "tuned.py").write_text(FUNCTION)
    (directory / "told.yaml").write_text(COMMAND)
    (directory / "program.py").write_text(PROGRAM)
    ended(run("run", "--study", "tuned.py", "--trials", "12", "--workers", "1"), "12 of 12 trials ended")
    ended(run("show", "11", "--study", "tuned"), "step-00000003")
    ended(run("run", "--study", "told.yaml", "--trials", "2", "--workers", "1"), "2 of 2 trials ended (2 complete)")
    ended(run("verify", "--study", "tuned"), "0 differences")
    refused(run("run", "--study", "mlp", "--trials", "1"), f"study 'mlp' trains with {NO_TORCH}")
    gp = run("run", "--study", "tuned.py", "--trials", "1", "--sampler", "gp", "--name", "gp")
    refused(gp, f"sampler 'gp' of study 'gp' computes with {NO_TORCH}")
    refused(run("lr-find", "--study", "mlp"), f"this command needs {NO_TORCH}")
    ended(run("init", "mine"), "hpo run --study mine.py")
    refused(run("run", "--study", "mine.py", "--trials", "1"), f"{directory / 'mine.py'}:13 imports {NO_TORCH}")


def test_the_wheel_has_every_file_of_the_packages(wheel):
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".pyc", ".md")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name for name in wanted if "/__pycache__/" not in name} == held


@pytest.mark.whole
def test_without_torch_functions_and_commands_are_searched(wheel, tmp_path):
    run = caller(linked(wheel, tmp_path, torch=False), tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert run("--version").stdout == f"hpo {hpo.__version__}\n", "a repository around an environment is not hpo's"
    search_without_torch(run, tmp_path)


@pytest.mark.whole
def test_with_torch_a_study_that_comes_along_trains(wheel, tmp_path):
    run = caller(linked(wheel, tmp_path, torch=True), tmp_path)
    epoch = ("--trials", "1", "--workers", "1", "-o", "train.num_epochs=1")
    ended(run("run", "--study", "mlp", *epoch), "1 of 1 trial ended (1 complete)")
    assert json.loads(run("best", "--study", "mlp", "--json").stdout)["values"]["val/accuracy"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_empty_environment_takes_the_wheel_both_ways(wheel, tmp_path):
    """Packages come from the registry: first without torch, then the extra is added as the sentence says."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip(environment / "bin" / "python", "install", str(wheel))
    run = caller(environment, tmp_path)
    search_without_torch(run, tmp_path)
    torch = version("torch").partition("+")[0]  # of the build that runs the tests, where pip finds that
    pip(environment / "bin" / "python", "install", "hpo[train]", f"torch=={torch}")
    for study in ("mine.py", "mlp", "atft", "gpt", "convnet"):
        epoch = ("--trials", "1", "--workers", "1", "-o", "train.num_epochs=1")
        ended(run("run", "--study", study, *epoch), "1 of 1 trial ended (1 complete)")
