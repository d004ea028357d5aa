"""The Makefile's targets: what they ask of hpo, and, run as they stand on small trials, what that leaves."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from places import ROOT
from typer.core import TyperGroup

from hpo.cli.main import app

pytestmark = pytest.mark.whole

QUICK = "--executor inline -o train.num_epochs=1"
SMALL = (
    "--executor inline -o data.market.num_days=420 -o data.market.num_stocks=24 -o data.split.val_days=40 "
    "-o data.split.test_days=20 -o data.split.min_train_days=20 -o data.min_stocks=10 -o model.hidden_size=8 "
    "-o train.num_epochs=1"
)
# The second trial is better than the first on any processor: the first learns nothing.
BETTER = """
from dataclasses import replace
from studies.mlp import STUDY as MLP

STILL = {"train.optim.name": "sgd", "train.optim.lr": 1e-4, "train.optim.momentum": 0.0, "train.batch_size": 256,
         "model.hidden_size": 16, "model.num_layers": 1, "model.dropout": 0.5}
QUICK = {"train.optim.name": "adamw", "train.optim.lr": 1e-2, "train.batch_size": 16, "model.hidden_size": 64,
         "model.num_layers": 1, "model.dropout": 0.0}
STUDY = replace(MLP, name="better", enqueue=[STILL, QUICK])
"""


# Keeps what it is asked; its best is what $FOUND says.
ASKED = """#!/bin/sh
printf '%s\\n' "$*" >> "$HPO_HOME/asked"
[ "$1 $4" = "best --to" ] && echo "$FOUND" > "$5"
[ "$1 $4" = "best " ] && echo "$3, trial 0: val/a 1, test/a 2" && echo "metrics: $HPO_HOME/checkpoints/$3/metrics.json"
exit 0
"""


def make(home: Path, target: str, *given: str, arguments: str = QUICK, bin: Path = Path(sys.executable).parent) -> str:
    call = ["make", "READY=", f"BIN={bin}", f"HPO_HOME={home}", f"HPO_ARGS={arguments}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*call, target, *given], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def left(said: str) -> list[tuple[str, Path]]:
    """(the trained study and what came of it, its metrics), as the last lines of a target name them."""
    found = re.findall(r"^(\S+, trial 0: .+)\n(?:checkpoint: .+\n)?metrics: (.+)\n", said, re.MULTILINE)
    last = [line for line in said.splitlines() if not line.startswith("make")][-1]  # a target of targets says it leaves
    assert last == f"metrics: {found[-1][1]}"
    return [(line, Path(path)) for line, path in found]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """(what a target says, the commands it gave to hpo), with a best configuration and arguments of one's own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hpo").write_text(ASKED)
    (tmp_path / "bin" / "hpo").chmod(0o755)

    def ask(target: str, *given: str, best: str = "model: {dropout: 0.1}", arguments: str = QUICK):
        monkeypatch.setenv("FOUND", best)
        log = tmp_path / "asked"
        log.write_text("")
        said = make(tmp_path, target, *given, arguments=arguments, bin=tmp_path / "bin")
        return said, [shlex.split(line) for line in log.read_text().splitlines()]

    return ask


TRAINED = {"train-optimized": "mlp-optimized", "train-atft": "atft-train", "train-integrated-safe": "atft-fold"}


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("target", [*TRAINED, "smoke"])
def test_one_name_is_one_configuration(target, asked):
    def names(**other: str) -> list[str]:
        said, commands = asked(target, "HPO_STUDY=mlp", **other)
        found = [command[command.index("--name") + 1] for command in commands if "--name" in command]
        if target in TRAINED:
            assert [line for line, _ in left(said)] == [f"{name}, trial 0: val/a 1, test/a 2" for name in found]
            assert found[0].startswith(TRAINED[target])
        return found

    first = names()
    assert len(set(first)) == len(first) == (3 if target == "train-integrated-safe" else 1)
    assert names() == first, "the same configuration is there already"
    assert names(arguments=f"--workers 3 {QUICK} --cpus-per-worker=2") == first, "the same, trained elsewhere"
    assert not {*first} & {*names(arguments=f"{QUICK} -o train.seed=1")}
    if target in ("train-optimized", "train-integrated-safe"):
        assert not {*first} & {*names(best="model: {dropout: 0.2}")}


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("target", [*TRAINED, "train-integrated"])
def test_a_home_that_only_some_of_the_commands_would_see_is_refused(target, tmp_path):
    for flag, variable in (("--home", "HPO_HOME"), ("--storage=", "HPO_STORAGE")):
        call = ["make", "--no-print-directory", "READY=", f"HPO_ARGS=--workers 2 {flag} {tmp_path}", target]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and f"give {variable}=... instead" in done.stderr and not done.stdout


@pytest.mark.usefixtures("process")
def test_a_path_that_only_looks_like_a_home_is_none(asked):
    _, commands = asked("train-atft", arguments=f"{QUICK} -o data.path=/x--home/y")
    assert any("data.path=/x--home/y" in command for command in commands)


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("asked_for", "study", "name"),
    [
        ("atft", "atft", "atft"),
        ("atft_production", "atft", "atft_production"),
        ("mlp_a_b", "mlp", "mlp_a_b"),
        ("_lm_a", "_lm_a", "_lm_a"),
        ("atft-production", "atft-production", "atft-production"),
        ("nosuch_a", "nosuch_a", "nosuch_a"),
        ("atft_a.py", "atft_a.py", "atft_a"),
        ("atft_a.py:b", "atft_a.py:b", "atft_a-b"),
        ("atft_dir/b.py", "atft_dir/b.py", "b"),
    ],
)
def test_a_suffix_gives_a_bundled_study_another_name(asked, asked_for, study, name):
    targets = ("hpo-run", "hpo-resume", "hpo-status", "smoke", "train-optimized")
    for target in targets:
        _, commands = asked(target, f"HPO_STUDY={asked_for}")
        for command in commands:
            if command[0] == "run":
                assert flag(command, "--study") == study
                assert re.sub(r"-(smoke|optimized)-\d+$", "", flag(command, "--name")) == name
            elif command[0] != "best" or "--to" in command:
                assert flag(command, "--study") == name
    call = ["make", "--dry-run", "READY=", f"HPO_STUDY={asked_for}", *targets]
    said = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    notice = f"HPO_STUDY={asked_for} stands for the study {study} under the name {name}."
    assert said.count(notice) == (len(targets) if study in ("atft", "mlp") and study != name else 0)


@pytest.mark.usefixtures("process")
def test_a_suffix_is_part_of_the_name_of_what_has_the_whole_name(tmp_path):
    """Both a bundled study and a file of that name go first."""
    for made in ("studies/atft/__init__.py", "studies/atft_one/__init__.py", "atft_two.py"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    for name, study in (
        ("atft_one", "atft_one"),
        ("atft_two", "atft_two"),
        ("atft_one_b", "atft_one"),
        ("atft_c", "atft"),
    ):
        call = ["make", "-f", ROOT / "Makefile", "--dry-run", "READY=", f"HPO_STUDY={name}", "hpo-run"]
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert f"run --study {study} --name {name} " in done.stdout


@pytest.mark.usefixtures("process")
def test_help_comes_first_and_shows_five_targets_before_all_others():
    alone, named = (
        subprocess.run(["make", *target], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
        for target in ([], ["help"])
    )
    assert alone == named and all(len(line) <= 80 for line in named.splitlines())
    first, *others = named.strip().split("\n\n")
    rows = first.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["hpo-run", "hpo-resume", "hpo-status", "hpo-ui", "train-optimized"]
    described = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = [row.split()[0] for group in (first, *others) for row in group.splitlines()[1:]]
    assert sorted(listed) == sorted(described)


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("target", ["hpo-run", "hpo-resume", "hpo-status", "hpo-ui", "train-integrated", *TRAINED])
@pytest.mark.parametrize("study", ["mlp", "somewhere/mine.py"])
def test_what_is_asked_can_be_asked(target, study, asked):
    """The flags exist; a study in a file is found again by the name it was run under, and so is what is trained."""
    _, commands = asked(target, f"HPO_STUDY={study}", arguments="")
    assert commands
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    known = {Path(study).stem}
    for command in commands:
        name, sub, rest = group.resolve_command(group.make_context("hpo", command[:1], resilient_parsing=True), command)
        assert sub, command
        params = sub.make_context(name, rest).params
        if name == "run":
            known.add(params["name"] or params["study"])
        elif "study" in params and name != "ui":  # whose page has every study of the home
            assert params["study"] in known


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_best_is_trained_again_when_it_is_another_one(tmp_path):
    home, study = tmp_path / "home", tmp_path / "better.py"
    study.write_text(BETTER)
    make(home, "hpo-run", f"HPO_STUDY={study}", "HPO_TRIALS=1")
    [(_, first)] = left(make(home, "train-optimized", f"HPO_STUDY={study}"))
    make(home, "hpo-run", f"HPO_STUDY={study}", "HPO_TRIALS=2")
    [(_, second)] = left(make(home, "train-optimized", f"HPO_STUDY={study}"))
    assert first != second and first.is_file() and second.is_file()
    accuracies = [json.loads(path.read_text())["metrics"]["val/accuracy"] for path in (first, second)]
    assert accuracies[0] < 0.5 < accuracies[1]


@pytest.mark.slow
def test_another_configuration_of_atft_is_trained_beside_the_first(tmp_path):
    said = [make(tmp_path, "train-atft", arguments=f"{SMALL} -o model.dropout={x}") for x in (0.1, 0.2)]
    paths = [left(one)[0][1] for one in said]
    assert paths[0] != paths[1] and all("val/rank_ic_5d" in path.read_text() for path in paths)


@pytest.mark.slow
def test_a_search_is_resumed_looked_at_and_tried_out(tmp_path):
    make(tmp_path, "hpo-run", "HPO_STUDY=mlp", "HPO_TRIALS=2")
    for target in ("hpo-status", "hpo-resume"):
        assert "2 of 2 trials ended" in make(tmp_path, target, "HPO_STUDY=mlp", arguments="")
    for arguments in (QUICK, f"{QUICK} -o model.dropout=0.1"):
        make(tmp_path, "smoke", "HPO_STUDY=mlp", arguments=arguments)


@pytest.mark.slow
def test_a_search_and_its_best_are_one_target(tmp_path):
    [(said, best)] = left(make(tmp_path, "train-integrated", "HPO_STUDY=mlp", "HPO_TRIALS=2"))
    assert "val/accuracy" in said and "val/accuracy" in best.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_best_of_atft_is_trained_on_every_fold(tmp_path):
    """What is said at the end of each fold is of the epoch that it is judged by, on the test days too."""
    folds = left(make(tmp_path, "train-integrated-safe", "HPO_TRIALS=1", arguments=f"{SMALL} -o train.num_epochs=3"))
    assert [line.split("-")[2] for line, _ in folds] == ["0", "1", "2"]
    for line, path in folds:
        judged = json.loads(path.read_text())["judged"]
        said = (f"{name} {judged['metrics'][name]:.6g}" for name in ("val/rank_ic_5d", "test/rank_ic_5d"))
        of = "" if judged["epoch"] == 3 else f" (epoch {judged['epoch']} of 3)"
        assert line.endswith(f", trial 0: {', '.join(said)}{of}")
