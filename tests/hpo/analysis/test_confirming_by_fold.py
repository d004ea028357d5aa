"""Confirming with a fold for each seed: what was chosen by luck with the validation data is not the best."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from study_runs import digest, hpo, refused, studies

import hpo as door
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home
from hpo.verify import verify

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

STUDY = '''
import hpo
from trainer.config import Frozen, TrainConfig
from trainer.report import Outcome

class Config(Frozen):
    x: float = 0.9
    fold: int = 2
    train: TrainConfig = TrainConfig(num_epochs=2)

class Loop:
    """On the validation data of fold 2, by which a search selects, x = 0.8 is lucky under every seed."""

    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        loss = self.config.x - (0.75 if (self.config.x, self.config.fold) == (0.8, 2) else 0.0)
        for epoch in (1, 2):
            reporter.report(epoch, {"loss": loss + 0.001 * self.config.train.seed + self.config.fold}, epoch=epoch)
        return Outcome("complete", 2, 2)

STUDY = hpo.Study(
    "folded", Config(), Loop, {"x": hpo.Choice([0.9, 0.1, 0.2, 0.3, 0.8, 0.4, 0.5, 0.6, 0.7, 1.0, 1.1, 1.2])},
    [hpo.Objective("loss")], sampler="grid", strategy="none", folds=[{"fold": 0}, {"fold": 1}],
)
'''
SEARCH = ("--trials", "12", "--executor", "inline", "--window", "1")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "folded.py"
    path.write_text(STUDY)
    return path


def run(home: Home, file: Path, *flags: str) -> str:
    result = hpo("run", "--study", str(file), *SEARCH, *flags, home=home)
    assert result.exit_code == 0, result.output
    return result.output


def best(home: Home) -> float:
    return door.open("folded", home=home.root).best["params"]["x"]


def test_other_folds_choose_what_other_seeds_alone_do_not(tmp_path, file):
    by_seed, by_fold = Home(tmp_path / "seed"), Home(tmp_path / "fold")
    run(by_seed, file, "--confirm", "2x2")
    shown = run(by_fold, file, "--confirm", "2x2folds")
    assert (best(by_seed), best(by_fold)) == (0.8, 0.1)
    assert studies(by_fold) == ["folded", "folded-confirm-folds"]
    assert "under 2 other seeds, each on another fold (study folded-confirm-folds)" in shown
    with closing(Ledger(by_fold.storage)) as ledger, ledger.read() as connection:
        row = queries.study_row(connection, "folded-confirm-folds")
        configs = queries.configs(connection, [trial.id for trial in queries.trial_rows(connection, row.id)])
    trained = [(config["x"], config["fold"], config["train"]["seed"]) for config in configs.values()]
    assert trained == [(x, fold, seed) for fold, seed in ((0, 1), (1, 2)) for x in (0.8, 0.1, 0.9)]
    assert verify(by_fold, by_fold.storage).differences == []


def test_the_command_confirms_by_fold_afterwards_and_beside_seeds_alone(tmp_path, file):
    phase, afterwards = Home(tmp_path / "phase"), Home(tmp_path / "afterwards")
    run(phase, file, "--confirm", "2x2folds")
    run(afterwards, file, "--confirm", "2x2")
    shown = hpo("confirm", "--study", "folded", "--top", "2", "--seeds", "2", "--folds", home=afterwards)
    assert shown.exit_code == 0, shown.output
    assert "mean ± standard error over 2 seeds, each on another fold of the data" in shown.stdout
    assert studies(afterwards) == ["folded", "folded-confirm", "folded-confirm-folds"]
    assert digest(phase, "folded-confirm-folds") == digest(afterwards, "folded-confirm-folds")
    assert best(afterwards) == 0.1, "the newest confirmation decides"
    facts = json.loads(hpo("best", "--study", "folded", "--json", home=afterwards).stdout)
    assert facts["seeds"]["by_fold"] and facts["seeds"]["study"] == "folded-confirm-folds"


def test_killed_in_the_phase_and_resumed_it_has_the_same_digest(tmp_path, file):
    """The search reports 24 times, a round of three trainings 6 times: report 32 is of the second round."""
    alone, killed = Home(tmp_path / "alone"), Home(tmp_path / "killed")
    run(alone, file, "--confirm", "2x2folds")
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@32"}
    flags = ["--study", str(file), *SEARCH, "--confirm", "2x2folds", "--home", str(killed.root)]
    done = subprocess.run([sys.executable, "-m", "hpo", "run", *flags], env=environ, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = hpo("resume", "--study", "folded", home=killed)
    assert resumed.exit_code == 0, resumed.output
    for study in ("folded", "folded-confirm-folds"):
        assert digest(killed, study) == digest(alone, study)
    assert best(killed) == 0.1 and verify(killed, killed.storage).differences == []


def test_folds_that_are_not_there_are_refused_before_anything_is_trained(tmp_path, file):
    home = Home(tmp_path / "home")
    many = "study 'folded' declares 2 folds: ask for no more seeds than that."
    error = refused(hpo("run", "--study", str(file), *SEARCH, "--confirm", "2x3folds", home=home), 2)
    assert f"--confirm 2x3folds: {many}" in error and not (home.root / "ledger.db").exists()
    run(home, file)
    assert many in refused(hpo("confirm", "--study", "folded", "--seeds", "3", "--folds", home=home), 2)
    file.write_text(STUDY.replace(', folds=[{"fold": 0}, {"fold": 1}]', ""))
    other = Home(tmp_path / "other")
    error = refused(hpo("run", "--study", str(file), *SEARCH, "--confirm", "2x2folds", home=other), 2)
    assert "--confirm 2x2folds: study 'folded' declares no folds (`folds=` of hpo.Study): confirm under other" in error


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ('[{"fould": 0}]', "fould"),
        ('{"fold": 0}', "folds={'fold': 0} must be a list."),
        ("[3]", "3 in folds must be a mapping of paths to values."),
    ],
)
def test_a_declaration_of_folds_that_cannot_be_read_is_refused(tmp_path, file, declared, words):
    file.write_text(STUDY.replace('[{"fold": 0}, {"fold": 1}]', declared))
    assert words in refused(hpo("run", "--study", str(file), *SEARCH, home=Home(tmp_path / "home")), 2)


def test_a_study_of_one_kind_takes_no_runs_of_the_other(tmp_path, file):
    home = Home(tmp_path / "home")
    run(home, file)
    flags = ("--study", "folded", "--top", "2", "--seeds", "2", "--name", "again")
    assert hpo("confirm", *flags, home=home).exit_code == 0
    error = refused(hpo("confirm", *flags, "--folds", home=home), 2)
    assert "study 'again' has trained without folds: name a new one by --name." in error


OF_FOLDS = """
import hpo
from studies.mlp import STUDY as MLP

STUDY = hpo.Study(
    "folded", MLP.config, MLP.task, {"train.optim.lr": hpo.Float(1e-3, 1e-2)}, MLP.objectives, hold_out=MLP.hold_out,
    folds=[{"data.split_seed": 1}, {"data.split_seed": 2}], confirm="2x2folds",
)
"""


def test_folds_by_which_the_search_judged_confirm_nothing(tmp_path):
    """Under train.folds each trial is validated on all days or samples that the confirming folds would be."""
    file, home = tmp_path / "folded.py", Home(tmp_path / "home")
    file.write_text(OF_FOLDS)
    flags = ("--trials", "6", "--executor", "inline", "-o", "train.folds=2", "-o", "train.num_epochs=1")
    used = "train.folds=2 judges every trial by all folds, and none is left that selected nothing"
    error = refused(hpo("run", "--study", str(file), *flags, "--confirm", "2x2folds", home=home), 2)
    assert f"--confirm 2x2folds: {used}. Or confirm under other seeds alone, by --confirm 2x2." in error
    assert f"--confirm 2x2: without folds, since {used}" in run(home, file, *flags)
    assert studies(home) == ["folded", "folded-confirm"]
    error = refused(hpo("confirm", "--study", "folded", "--top", "2", "--seeds", "2", "--folds", home=home), 2)
    assert f"{used}. Confirm without --folds, under other seeds alone." in error


def test_folds_that_train_once_confirm_a_search_that_was_judged_by_others(tmp_path):
    """A training counts as one epoch, like a fold of the search: six trainings are a third of twelve folds and six."""
    file, home = tmp_path / "folded.py", Home(tmp_path / "home")
    once = ('{"data.split_seed"', '{"train.folds": 1, "data.split_seed"')
    file.write_text(OF_FOLDS.replace(*once).replace("folds=[", 'presets={"of": {"train.folds": 2}}, folds=['))
    flags = ("--trials", "6", "--executor", "inline", "-o", "train.num_epochs=3")
    shown = run(home, file, *flags, "-o", "preset=of")
    assert "--confirm" not in shown.replace("--confirm none", "")
    assert studies(home) == ["folded", "folded-confirm-folds"]
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        rows = queries.trial_rows(connection, queries.study_row(connection, "folded-confirm-folds").id)
        configs = queries.configs(connection, [row.id for row in rows]).values()
    assert [row.epoch for row in rows] == [3] * 6
    assert [(config["train"]["folds"], config["data"]["split_seed"]) for config in configs] == [(1, 1)] * 3 + [
        (1, 2)
    ] * 3
    other = Home(tmp_path / "other")
    set_by_run = "train.folds is set for the search and by the folds, which may thus have selected the trials"
    assert f"--confirm 2x2: without folds, since {set_by_run}" in run(other, file, *flags, "-o", "train.folds=2")


def test_folds_that_the_search_sets_otherwise_confirm_nothing(tmp_path, file):
    """The search may then select by the very fold that would confirm it."""
    home, flags = Home(tmp_path / "home"), ("-o", "fold=0")
    both = "fold is set for the search and by the folds, which may thus have selected the trials"
    error = refused(hpo("run", "--study", str(file), *SEARCH, *flags, "--confirm", "2x2folds", home=home), 2)
    assert f"--confirm 2x2folds: {both}. Or confirm under other seeds alone, by --confirm 2x2." in error
    file.write_text(STUDY.replace('strategy="none"', 'strategy="none", confirm="2x2folds"'))
    assert f"--confirm 2x2: without folds, since {both}" in run(home, file, *flags)
    assert studies(home) == ["folded", "folded-confirm"]
    error = refused(hpo("confirm", "--study", "folded", "--top", "2", "--seeds", "2", "--folds", home=home), 2)
    assert f"{both}. Confirm without --folds, under other seeds alone." in error


def test_a_fold_that_the_configuration_refuses_confirms_nothing(tmp_path, file):
    file.write_text("from pydantic import PositiveInt\n" + STUDY.replace("fold: int = 2", "fold: PositiveInt = 2"))
    home = Home(tmp_path / "home")
    error = refused(hpo("run", "--study", str(file), *SEARCH, "--confirm", "2x2folds", home=home), 2)
    assert "--confirm 2x2folds: the fold of fold=0 cannot be trained: fold" in error and "by --confirm 2x2." in error
    run(home, file)
    error = refused(hpo("confirm", "--study", "folded", "--top", "2", "--seeds", "2", "--folds", home=home), 2)
    assert "the fold of fold=0 cannot be trained" in error and studies(home) == ["folded"]


def test_a_study_of_trials_trained_again_is_not_confirmed(tmp_path, file):
    home = Home(tmp_path / "home")
    run(home, file, "--confirm", "2x2")
    for command in ("confirm", "ablate"):
        error = refused(hpo(command, "--study", "folded-confirm", home=home), 2)
        assert "study 'folded-confirm' has trained trials of study 'folded' again: give --study folded." in error
