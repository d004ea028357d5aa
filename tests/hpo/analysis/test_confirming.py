"""The confirming phase: after a search, the best trials and the default configuration race under other seeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from places import HARNESS
from study_runs import digest, hpo, refused, studies

import hpo as door
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home
from hpo.tracking import mirror_process
from hpo.tracking.uri import tracker_name
from hpo.verify import verify

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

NOISY = '''
import hpo

GRID = [0.9, 0.1, 0.2, 0.3, 0.8, 0.4, 0.5, 0.6, 0.7, 1.0, 1.1, 1.2]

@hpo.study(space={"x": hpo.Choice(GRID)}, minimize="loss", num_epochs=4, strategy="none", sampler="grid")
def noisy(trial):
    """Under the search's seed 0 the trial of x = 0.8 is the luckiest; the default is x = 0.9. Each seed has a loss of
    its own that all configurations share, and each configuration a little noise."""
    luck = 0.75 if trial.params.x == 0.8 and trial.seed == 0 else 0.0
    noise = 0.01 * ((trial.seed * 7 + round(100 * trial.params.x)) % 5)
    for epoch in range(1, 5):
        if trial.report(epoch, {"loss": trial.params.x + trial.seed - luck + noise}):
            return
'''
SEARCH = ("--executor", "inline", "--window", "1")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return path


def run(home: Home, file: Path, *flags: str, trials: int = 12):
    result = hpo("run", "--study", str(file), "--trials", str(trials), *SEARCH, *flags, home=home)
    assert result.exit_code == 0, result.output
    return result


def listed(home: Home, study: str = "noisy-confirm") -> list[tuple[str, int]]:
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        rows = queries.study_row(connection, study).spec.listed
    return [(row["label"], row["params"]["train.seed"]) for row in rows]


def best(home: Home) -> float:
    return door.open("noisy", home=home.root).best["params"]["x"]


def test_the_luckiest_trial_leaves_the_race_and_other_seeds_choose(tmp_path, file):
    home = Home(tmp_path / "home")
    ran = run(home, file, "--confirm", "2x2")
    assert "would take" not in ran.output and "round 2 of 2" in ran.output
    labels = ["trial 4", "trial 1", "default"]
    assert listed(home) == [(label, seed) for seed in (1, 2) for label in labels]
    assert best(home) == 0.1 and "under 2 other seeds (study noisy-confirm)" in ran.output
    assert "the search itself has trial 4 first" in ran.output
    shown = hpo("best", "--study", "noisy", home=home).stdout
    for text in (ran.output, shown):
        assert "better than trial 4 by 0.7 " in text and "better than the default configuration by 0.8 " in text
    with closing(Ledger(home.storage)) as ledger:
        name = tracker_name(home.tracking_uri)
        assert all(mirror_process.behind(ledger, name, study) == 0 for study in studies(home))
    assert verify(home, home.storage).differences == []


def test_without_it_a_search_is_what_it_was_and_none_takes_it_back(tmp_path, file):
    plain, confirmed = Home(tmp_path / "plain"), Home(tmp_path / "confirmed")
    run(plain, file)
    run(confirmed, file, "--confirm", "2x2")
    assert studies(plain) == ["noisy"] and best(plain) == 0.8
    assert digest(plain, "noisy") == digest(confirmed, "noisy")
    run(plain, file, "--confirm", "2x2")
    assert digest(plain, "noisy-confirm") == digest(confirmed, "noisy-confirm")
    other = Home(tmp_path / "none")
    run(other, file, "--confirm", "2x2", "--confirm", "none")
    assert studies(other) == ["noisy"]


def killed_at(tmp_path: Path, file: Path, point: str, hit: int) -> Home:
    """The home of a study that was killed where it passed a point so often."""
    killed = Home(tmp_path / "killed")
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{point}=kill@{hit}"}
    flags = ["--study", str(file), "--trials", "12", *SEARCH, "--confirm", "2x2", "--home", str(killed.root)]
    done = subprocess.run([sys.executable, "-m", "hpo", "run", *flags], env=environ, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return killed


def check_resumed(tmp_path: Path, file: Path, killed: Home) -> None:
    """Resumed, search and race are what they are alone."""
    alone = Home(tmp_path / "alone")
    run(alone, file, "--confirm", "2x2")
    resumed = hpo("resume", "--study", "noisy", home=killed)
    assert resumed.exit_code == 0, resumed.output
    for study in ("noisy", "noisy-confirm"):
        assert digest(killed, study) == digest(alone, study)
    assert best(killed) == best(alone) == 0.1
    assert verify(killed, killed.storage).differences == []


def test_killed_and_resumed_it_has_the_same_digest(tmp_path, file):
    """The search reports 48 times, a round of three trainings 12 times: report 67 is of the second round."""
    killed = killed_at(tmp_path, file, "worker.after_report_commit", 67)
    assert "hpo resume --study noisy " in hpo("status", "--study", "noisy-confirm", home=killed).stdout
    assert best(killed) == 0.8, "the round is not complete"
    check_resumed(tmp_path, file, killed)


@pytest.mark.slow
@pytest.mark.parametrize("hit", range(49, 73, 4))
def test_a_kill_in_any_training_of_the_race_changes_nothing(tmp_path, file, hit):
    """A training reports four times, so each of the six is killed at its first report."""
    check_resumed(tmp_path, file, killed_at(tmp_path, file, "worker.after_report_commit", hit))


def test_two_workers_confirm_as_one_does(tmp_path, file):
    homes = [Home(tmp_path / str(workers)) for workers in (1, 2)]
    for workers, home in enumerate(homes, 1):
        flags = ["--executor", "local", "--workers", str(workers), "--window", "4", "--confirm", "2x2"]
        ran = hpo("run", "--study", str(file), "--trials", "12", *flags, home=home)
        assert ran.exit_code == 0, ran.output
    for study in ("noisy", "noisy-confirm"):
        assert digest(homes[0], study) == digest(homes[1], study)


def test_more_trials_are_confirmed_anew_and_nothing_is_trained_twice(tmp_path, file):
    parts, once = Home(tmp_path / "parts"), Home(tmp_path / "once")
    run(parts, file, "--confirm", "2x2", trials=11)
    before = listed(parts)
    run(parts, file)
    run(once, file, "--confirm", "2x2")
    assert digest(parts, "noisy") == digest(once, "noisy") and best(parts) == best(once)
    assert listed(parts)[: len(before)] == before and len(set(listed(parts))) == len(listed(parts))
    again = run(parts, file)
    assert "round" not in again.output


def test_the_command_does_the_same_afterwards(tmp_path, file):
    phase, afterwards = Home(tmp_path / "phase"), Home(tmp_path / "afterwards")
    run(phase, file, "--confirm", "2x2")
    run(afterwards, file)
    shown = hpo("confirm", "--study", "noisy", "--top", "2", "--seeds", "2", "--json", home=afterwards)
    assert shown.exit_code == 0, shown.output
    assert digest(phase, "noisy-confirm") == digest(afterwards, "noisy-confirm")
    found = json.loads(shown.stdout)
    assert found["default"]["mean"] > found["rows"][0]["again"]["mean"] and found["gain"]["mean"] > 0
    text = hpo("confirm", "--study", "noisy", "--top", "2", "--seeds", "2", home=phase).stdout
    assert "it is better than the default configuration by " in text and "\ndefault " in text


def test_a_third_of_the_epochs_bounds_it_and_a_sentence_says_so(tmp_path, file):
    """48 epochs are searched, so 24 confirm: six trainings of four."""
    home = Home(tmp_path / "home")
    ran = run(home, file, "--confirm", "4x3")
    assert "--confirm 4x3 would take more than a third of all epochs: --confirm 2x2 instead" in ran.output
    assert len(listed(home)) == 6


def test_epochs_bound_search_and_phase_together(tmp_path, file):
    """Of 30 epochs the phase may need 10, so the search trains five trials of four, and two trainings follow."""
    home = Home(tmp_path / "home")
    ran = hpo("run", "--study", str(file), "--epochs", "30", *SEARCH, "--confirm", "2x1", home=home)
    assert ran.exit_code == 0, ran.output
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        assert queries.study_row(connection, "noisy").max_epochs == 30
        rows = [queries.trial_rows(connection, queries.study_row(connection, name).id) for name in studies(home)]
    assert [len(trials) for trials in rows] == [5, 2]
    more = hpo("resume", "--study", "noisy", "--epochs", "36", home=home)
    assert more.exit_code == 0, more.output
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        rows = [queries.trial_rows(connection, queries.study_row(connection, name).id) for name in studies(home)]
    assert [len(trials) for trials in rows] == [6, 3]


def test_a_declared_phase_is_the_default_of_its_study(tmp_path, file):
    file.write_text(NOISY.replace('sampler="grid"', 'sampler="grid", confirm="2x1"'))
    home = Home(tmp_path / "home")
    run(home, file)
    assert studies(home) == ["noisy", "noisy-confirm"]
    file.write_text(NOISY.replace('sampler="grid"', 'sampler="grid", confirm="2y1"'))
    error = refused(hpo("run", "--study", str(file), "--trials", "2", home=Home(tmp_path / "b")), 2)
    assert "study 'noisy': confirm='2y1': give TRIALSxSEEDS, such as 5x3" in error


@pytest.mark.parametrize("text", ["5y3", "0x3", "3x0", "5", "x3", "5x3x2", "-1x2", "5x99999", "05x3", ""])
def test_malformed_text_is_refused(tmp_path, file, text):
    error = refused(hpo("run", "--study", str(file), "--trials", "9", "--confirm", text, home=Home(tmp_path / "h")), 2)
    assert f"--confirm {text or repr('')}: give TRIALSxSEEDS, such as 5x3 for the five best trials" in error


SEEDLESS = """
import hpo
from pydantic import BaseModel, ConfigDict

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    x: float = 0.5

class Task:
    def __init__(self, config): ...
    def fit(self, reporter, checkpoints): ...

STUDY = hpo.Study("seedless", Config(), Task, {"x": hpo.Float(0.0, 1.0)}, [hpo.Objective("loss")])
"""


def test_a_population_and_a_task_without_a_seed_are_refused(tmp_path):
    home = Home(tmp_path / "home")
    flags = ["--study", str(HARNESS / "population_study.py"), "--trials", "12", "--confirm", "2x2"]
    error = refused(hpo("run", *flags, home=home), 2)
    assert "--confirm 2x2: no phase follows a search by strategy 'pbt': omit it, and run `hpo confirm" in error
    path = tmp_path / "seedless.py"
    path.write_text(SEEDLESS)
    error = refused(hpo("run", "--study", str(path), "--trials", "5", "--confirm", "2x2", home=home), 2)
    why = "study 'seedless' has no field train.seed, by which a training could be repeated otherwise"
    assert f"--confirm 2x2: {why}: give the configuration that field, or --confirm none." in error


def test_more_trials_than_there_are_are_refused(tmp_path, file):
    flags = ["--study", str(file), "--trials", "4", *SEARCH, "--confirm", "5x3"]
    error = refused(hpo("run", *flags, home=Home(tmp_path / "home")), 2)
    assert "--confirm 5x3: study 'noisy' has 4 trials, and 5 are to be confirmed: give --trials 5 or more, or " in error
    assert "--confirm 4x3." in error
