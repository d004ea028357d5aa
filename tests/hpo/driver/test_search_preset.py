"""The preset under which a study searches: for new studies that name none, and not for what trains its best trial."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from study_runs import hpo, refused

from hpo.ledger import Ledger, queries
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

STUDY = """
import hpo
from studies.mlp import STUDY as MLP

STUDY = hpo.Study(
    "judged", MLP.config, MLP.task, {"train.optim.lr": hpo.Float(1e-3, 1e-2)}, MLP.objectives,
    presets={"folds": {"train.folds": 2, "train.num_epochs": 1}, "long": {"train.num_epochs": 3}},
    search_preset="folds",
)
"""
INLINE = ("--executor", "inline")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "judged.py"
    path.write_text(STUDY)
    return path


def stored(home: Home, name: str) -> tuple[dict[str, Any], set[tuple[int, int]]]:
    """Returns a study's overrides, and the folds and epochs of its trials."""
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        study = queries.study_row(connection, name)
        rows = queries.trial_rows(connection, study.id)
        trains = [config["train"] for config in queries.configs(connection, [row.id for row in rows]).values()]
    return study.spec.overrides, {(train["folds"], train["num_epochs"]) for train in trains}


def done(*arguments: str, home: Home) -> str:
    result = hpo(*arguments, home=home)
    assert result.exit_code == 0, result.output
    return result.output


def train_line(*arguments: str, home: Home) -> str:
    return next(line for line in done(*arguments, home=home).splitlines() if line.startswith("train it"))


def test_a_new_study_that_names_no_preset_has_the_declared_one(tmp_path, file):
    home = Home(tmp_path / "home")
    run = ("run", "--study", str(file), "--trials", "1", *INLINE)
    done(*run, home=home)
    done(*run, "--name", "once", "-o", "preset=none", "-o", "train.num_epochs=2", home=home)
    done(*run, "--name", "long", "-o", "preset=long", home=home)
    done(*run, "--name", "both", "-o", "train.num_epochs=2", home=home)
    assert stored(home, "judged") == ({"preset": "folds", "train.folds": 2, "train.num_epochs": 1}, {(2, 1)})
    assert stored(home, "once") == ({"preset": "none", "train.num_epochs": 2}, {(1, 2)})
    assert stored(home, "long")[1] == {(1, 3)} and stored(home, "both")[1] == {(2, 2)}


def test_a_study_begun_before_it_was_declared_keeps_its_trials(tmp_path, file):
    home = Home(tmp_path / "home")
    file.write_text(STUDY.replace('    search_preset="folds",\n', ""))
    done("run", "--study", str(file), "--trials", "1", *INLINE, "-o", "train.num_epochs=1", home=home)
    file.write_text(STUDY)
    done("resume", "--study", "judged", "--trials", "3", "--allow-drift", home=home)
    assert stored(home, "judged") == ({"train.num_epochs": 1}, {(1, 1)})
    line = train_line("best", home=home)
    assert line.startswith("train it: ") and "-o preset=none -o train.num_epochs=1" in line


def test_the_command_that_trains_the_best_trial_leaves_it_out(tmp_path, file):
    home = Home(tmp_path / "home")
    done("run", "--study", str(file), "--trials", "2", *INLINE, "-o", "train.batch_size=64", home=home)
    line = train_line("best", home=home)
    assert line.startswith("train it without the preset folds of the search: hpo run --study ")
    assert "-o preset=none -o train.batch_size=64 -o train.optim.lr=" in line and "train.folds" not in line
    done(*shlex.split(line.partition(": hpo ")[2]), *INLINE, "-o", "train.num_epochs=4", home=home)
    saved = tmp_path / "best.yaml"
    line = train_line("best", "--study", "judged", "--to", str(saved), home=home)
    again = line.partition(": hpo ")[2].replace("judged-best", "saved")
    done(*shlex.split(again), *INLINE, "-o", "train.num_epochs=4", home=home)
    assert stored(home, "judged-best") == stored(home, "saved")
    assert stored(home, "saved")[1] == {(1, 4)} and stored(home, "saved")[0]["preset"] == "none"
    searched = saved.read_text().partition("train:")  # what is searched can be tried first in another study
    saved.write_text("".join(searched[1:]).replace("  batch_size: 64\n", ""))
    run = ("run", "--study", str(file), "--name", "again", "--trials", "1", "--enqueue", str(saved), *INLINE)
    done(*run, home=home)
    assert stored(home, "again")[0]["preset"] == "folds"


def test_a_new_study_says_that_it_has_it(tmp_path, file):
    home = Home(tmp_path / "home")
    run = ("run", "--study", str(file), "--trials", "1", *INLINE)
    said = "preset=folds, under which this study searches; a new study takes none by -o preset=none"
    shown = done(*run, home=home)
    assert said in shown and "kept from before" not in shown
    assert said not in done(*run, "--name", "once", "-o", "preset=none", home=home)


def test_a_study_of_the_ledger_keeps_its_own(tmp_path, file):
    home = Home(tmp_path / "home")
    file.write_text(STUDY.replace('    search_preset="folds",\n', ""))
    done("run", "--study", str(file), "--trials", "1", *INLINE, "-o", "train.num_epochs=1", home=home)
    file.write_text(STUDY.replace('"train.num_epochs": 1}', '"train.batch_size": 128}'))
    steps = [
        done("schedule", *flags, home=home).splitlines()[0]
        for flags in (
            ("--study", "judged"),
            ("--study", str(file), "-o", "preset=none", "-o", "train.num_epochs=1"),
        )
    ]
    assert steps[0] == steps[1], "the study of the ledger has no preset"
    assert done("schedule", "--study", str(file), home=home).splitlines()[0] != steps[0]


def test_confirmed_without_it_a_trial_trains_once(tmp_path, file):
    home = Home(tmp_path / "home")
    done("run", "--study", str(file), "--trials", "1", *INLINE, home=home)
    once = ("-o", "preset=none", "-o", "train.num_epochs=2", "--executor", "inline")
    done("confirm", "--study", "judged", "--top", "1", "--seeds", "1", *once, home=home)
    assert stored(home, "judged-confirm") == ({"preset": "none", "train.num_epochs": 2}, {(1, 2)})


def test_what_excludes_folds_names_the_way_out(tmp_path, file):
    home = Home(tmp_path / "home")
    run = ("run", "--study", str(file), "--trials", "20", *INLINE)
    error = refused(hpo(*run, "-o", "train.parallel.data=2", home=home), 2)
    assert "Or search without the preset folds by -o preset=none." in error
    assert "give -o preset=none, or choose another strategy" in refused(hpo(*run, "--strategy", "pbt", home=home), 2)
    assert "folds, long, none" in refused(hpo(*run, "-o", "preset=fold", home=home), 2)


def test_a_name_that_is_no_preset_is_refused(tmp_path, file):
    file.write_text(STUDY.replace('search_preset="folds"', 'search_preset="fold"'))
    error = refused(hpo("run", "--study", str(file), "--trials", "1", home=Home(tmp_path / "home")), 2)
    assert "search_preset='fold' is none of its presets" in error
    file.write_text(STUDY.replace('"long": ', '"none": '))
    error = refused(hpo("run", "--study", str(file), "--trials", "1", home=Home(tmp_path / "home")), 2)
    assert "a preset is called 'none', which names none" in error
    file.write_text(STUDY.replace('"train.folds": 2', '"train.optim.lr": 0.002'))
    error = refused(hpo("run", "--study", str(file), "--trials", "1", home=Home(tmp_path / "home")), 2)
    assert "search_preset='folds' sets train.optim.lr, which is searched: leave one of them" in error
