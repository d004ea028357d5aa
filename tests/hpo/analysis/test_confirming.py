"""The confirming phase: after a search, the best trials and the default configuration race under other seeds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from places import HARNESS
from scipy import stats
from sqlalchemy import select
from study_runs import digest, hpo, refused, studies

import hpo as door
from hpo.analysis.report import data, page
from hpo.ledger import Ledger, queries
from hpo.ledger import answer as answers
from hpo.ledger.database import tables
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
UNLUCKY = '''
import hpo

@hpo.study(space={"x": hpo.Choice([0.05, 0.1, 0.2, 0.3])}, minimize="loss", num_epochs=4, strategy="none",
           sampler="grid")
def unlucky(trial):
    """Under the search's seed 0 the default, x = 0.05, is unlucky. Under others it is the best, by 0.05 on average."""
    luck = (0.75 if trial.seed == 0 else SWING * (-1) ** trial.seed) if trial.params.x == 0.05 else 0.0
    for epoch in range(1, 5):
        if trial.report(epoch, {"loss": trial.params.x + trial.seed + luck}):
            return
'''
SEARCH = ("--executor", "inline", "--window", "1")
SLOWLY = "        time.sleep(0.1)\n        if"


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


def default_first(tmp_path: Path, swing: float) -> tuple[str, str, dict[str, Any]]:
    """What `hpo best`, `hpo confirm` and the report say where the default is the best under other seeds."""
    (tmp_path / "unlucky.py").write_text(UNLUCKY.replace("SWING", str(swing)))
    home = Home(tmp_path / "home")
    ran = hpo("run", "--study", str(tmp_path / "unlucky.py"), "--trials", "4", *SEARCH, home=home)
    confirmed = hpo("confirm", "--study", "unlucky", "--top", "2", "--seeds", "2", "--executor", "inline", home=home)
    assert ran.exit_code == confirmed.exit_code == 0, confirmed.output
    with closing(Ledger(home.storage)) as ledger:
        report = data.read(ledger, home, "unlucky")
    shown = " ".join(re.sub("<[^>]+>", "", page.file_page([report]).partition("<article")[2]).split())
    return hpo("best", "--study", "unlucky", home=home).stdout, confirmed.stdout, report.to_json() | {"text": shown}


def test_a_default_that_beats_the_best_trial_is_the_headline(tmp_path):
    best_says, confirm_says, report = default_first(tmp_path, 0.0)
    mean = "best mean under other seeds: the default configuration, 1.55 ± 0.5; then trial 1, 1.6 ± 0.5"
    beaten = "the default configuration is better than trial 1 by 0.05 ("
    for text in (best_says, confirm_says):
        assert mean in text and beaten in text
    assert best_says.startswith("unlucky: the default configuration is better than the best trial under other seeds\n")
    assert "by 0.05 (the same for each of 2 seeds)" in best_says
    headline = "The default configuration is better than the best trial: loss 1.55 ± 0.50 under other seeds"
    assert headline in report["text"] and mean[1:] in report["text"] and beaten[1:] in report["text"]
    assert not [step for step in report["next_steps"] if "promote" in step["command"]]


def test_a_default_that_may_be_best_is_named_with_what_may_tell(tmp_path):
    best_says, confirm_says, report = default_first(tmp_path, 0.06)
    differences = [0.05 - 0.06, 0.05 + 0.06]  # by seeds 2 and 1

    def low(seeds: int) -> float:
        return stats.t.interval(0.95, seeds - 1, 0.05, stdev(differences) / math.sqrt(seeds))[0]

    needed = next(seeds for seeds in range(3, 31) if low(seeds) > 0)
    told = f"hpo confirm --study unlucky --top 2 --seeds {needed} --home {tmp_path / 'home'}` may tell them apart"
    default = "the default configuration"
    doubt = f"2 seeds cannot tell {default} from trial 1: {default} is better by 0.05 (standard error 0.06,"
    ended = hpo("resume", "--study", "unlucky", home=Home(tmp_path / "home")).output
    for text in (best_says, confirm_says, ended):
        assert doubt in text and told in text
    assert doubt in report["text"] and told.replace("`", "") in report["text"]
    assert "Trial 1 is the best of 4 trials under other seeds: loss 1.60 ± 0.50" in report["text"]
    more = [step["command"] for step in report["next_steps"] if "seeds" in step["command"]]
    assert len(more) == 1 and more[0] + "` may tell them apart" == told


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


def check_resumed(tmp_path: Path, file: Path, killed: Home, *flags: str) -> None:
    """Resumed, search and race are what they are alone."""
    alone = Home(tmp_path / "alone")
    run(alone, file, "--confirm", "2x2", *flags)
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
    after = hpo("status", "--study", "noisy", home=killed).stdout.splitlines()[-1]
    assert after.startswith("hpo resume --study noisy ")
    assert after.endswith("goes on with study noisy-confirm, which was interrupted")
    assert best(killed) == 0.8, "the round is not complete"
    check_resumed(tmp_path, file, killed)


@pytest.mark.slow
@pytest.mark.parametrize("hit", range(49, 73, 4))
def test_a_kill_in_any_training_of_the_race_changes_nothing(tmp_path, file, hit):
    """A training reports four times, so each of the six is killed at its first report."""
    check_resumed(tmp_path, file, killed_at(tmp_path, file, "worker.after_report_commit", hit))


def reported(home: Home) -> int:
    with contextlib.suppress(sqlite3.OperationalError), closing(sqlite3.connect(home.root / "ledger.db")) as connection:
        return connection.execute("SELECT count(*) FROM reports WHERE key = 'loss'").fetchone()[0]
    return 0  # there is no ledger yet


@pytest.mark.slow
@pytest.mark.parametrize("target", ["driver", "worker"])
@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_instant_of_the_race_changes_nothing(tmp_path, file, seed, target):
    """The race's 24 reports follow the 48 of the search; two workers, of which one may be what is killed."""
    rng, killed = random.Random(f"{seed} {target}"), Home(tmp_path / "killed")
    file.write_text(NOISY.replace("    for epoch", "    import time\n    for epoch").replace("        if", SLOWLY))
    parallel = ["--executor", "local", "--workers", "2", "--window", "4"]
    flags = ["--study", str(file), "--trials", "12", *parallel, "--confirm", "2x2", "--home", str(killed.root)]
    command = [sys.executable, "-m", "hpo", "run", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        instant = 48 + rng.randrange(1, 23)
        while reported(killed) < instant:
            assert driver.poll() is None, driver.communicate()[0]
            time.sleep(0.01)
        time.sleep(0.1 * rng.random())
        with closing(Ledger(killed.storage)) as ledger, ledger.read() as connection:
            newest = select(tables.workers.c.pid).order_by(tables.workers.c.started_at.desc()).limit(1)
            worker = connection.execute(newest).scalar_one()
        os.kill(driver.pid if target == "driver" else worker, signal.SIGKILL)
        driver.communicate(timeout=240)
    check_resumed(tmp_path, file, killed, *parallel)


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
    assert "trial 1 is better than the default configuration by " in text and "\ndefault " in text


def test_an_interrupted_command_is_the_one_that_goes_on(tmp_path, file):
    """The list of its study ends with the round, so only the command knows that another one is to come."""
    killed, alone = Home(tmp_path / "killed"), Home(tmp_path / "alone")
    for home in (killed, alone):
        run(home, file)
    confirm = ["confirm", "--study", "noisy", "--top", "2", "--seeds", "2", "--executor", "inline"]
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@5"}
    flags = [sys.executable, "-m", "hpo", *confirm, "--home", str(killed.root)]
    assert subprocess.run(flags, env=environ, capture_output=True, timeout=240).returncode == -signal.SIGKILL
    goes_on = "hpo confirm --study noisy --top 2 --seeds 2 "
    assert hpo("status", "--study", "noisy-confirm", home=killed).stdout.splitlines()[-1].startswith(goes_on)
    resumed = hpo("resume", "--study", "noisy-confirm", home=killed)
    assert f"only the present round of noisy-confirm is trained to its end: `{goes_on}" in resumed.output
    assert len(listed(killed)) == 3, "the round"
    for home in (killed, alone):
        shown = hpo(*confirm, home=home)
        assert shown.exit_code == 0 and "hpo compare" not in shown.output, shown.output
    assert digest(killed, "noisy-confirm") == digest(alone, "noisy-confirm") and best(killed) == best(alone)


def test_the_forecast_is_of_the_search_whatever_other_seeds_choose(tmp_path, file):
    plain, confirmed = Home(tmp_path / "plain"), Home(tmp_path / "confirmed")
    run(plain, file)
    run(confirmed, file, "--confirm", "2x2")
    more = door.open("noisy", home=confirmed.root).forecast()
    before = door.open("noisy", home=plain.root).forecast()
    assert vars(more) | {"seconds": 0} == vars(before) | {"seconds": 0} and (more.trial, best(confirmed)) == (4, 0.1)
    error = refused(hpo("forecast", "--study", "noisy-confirm", home=confirmed), 2)
    assert "trained trials of study 'noisy' again, and a forecast is made of a search: give --study noisy." in error
    assert "expected gain" not in hpo("status", "--study", "noisy-confirm", home=confirmed).stdout


def test_the_command_for_more_seeds_trains_both_trials(tmp_path, file):
    """The runner-up under other seeds is the third of the search, and the last of a race of its own."""
    home = Home(tmp_path / "home")
    run(home, file)
    first = hpo("confirm", "--study", "noisy", "--top", "3", "--seeds", "1", "--executor", "inline", home=home)
    assert first.exit_code == 0, first.output
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        [answer] = answers.bests(connection, queries.study_row(connection, "noisy"))
    assert (answer.number, answer.seeds.rivals[0].name, answer.seeds.top) == (1, "trial 2", 3)
    assert (
        json.loads(hpo("confirm", "--study", "noisy", "--seeds", "1", "--top", "3", "--json", home=home).stdout)["top"]
        == 3
    )
    over = hpo("confirm", "--study", "noisy", "--seeds", "1", "--top", "99", "--executor", "inline", home=home)
    assert "--top 99: the study has only 12 complete trials" in over.output and len(listed(home)) == 13


def test_a_third_of_the_epochs_bounds_it_and_a_sentence_says_so(tmp_path, file):
    """48 epochs are searched, so 24 confirm: six trainings of four."""
    home = Home(tmp_path / "home")
    ran = run(home, file, "--confirm", "4x3")
    assert ran.output.count("--confirm 4x3 would take more than a third of all epochs: --confirm 2x2 instead") == 1
    assert len(listed(home)) == 6


def test_new_candidates_train_under_as_many_seeds_as_earlier_ones(tmp_path, file):
    """Of 12 trials' 48 epochs 24 are left to the phase: six trainings of four, which the first race needs. The
    thirteenth trial is the best since. It needs two more, for which the search has to train sixteen trials."""
    file.write_text(NOISY.replace("1.1, 1.2]", "1.1, 1.2, 0.0, 1.3, 1.4, 1.5]"))
    home = Home(tmp_path / "home")
    run(home, file, "--confirm", "2x2")
    before = listed(home)
    more = run(home, file, trials=13)
    short = (
        "no trial is trained again: 2 epochs are left of a third of all, and two configurations of --confirm 2x2 need"
    )
    assert f"{short} 8; search for 12 epochs more." in more.output and listed(home) == before
    forced = hpo("confirm", "--study", "noisy", "--top", "1", "--seeds", "2", "--executor", "inline", home=home)
    assert forced.exit_code == 0 and len(listed(home)) == 8, forced.output
    assert "no trial is trained again" not in run(home, file, "--confirm", "1x2", trials=13).output, "all has trained"
    more = run(home, file, "--confirm", "2x2", trials=16)
    assert listed(home) == [*before, ("trial 12", 1), ("trial 12", 2)] and best(home) == 0.0
    assert "would take more" not in more.output, "the other candidates have trained"


def test_a_search_too_short_for_it_says_by_how_much(tmp_path, file):
    """Three trials of four epochs leave six epochs; eight are half of the sixteen that four trials train."""
    ran = run(Home(tmp_path / "home"), file, "--confirm", "2x1", trials=3)
    assert (
        "6 epochs are left of a third of all, and two configurations of --confirm 2x1 need 8; search for 4"
        in ran.output
    )
    more = hpo("resume", "--study", "noisy", "--trials", "4", home=Home(tmp_path / "home"))
    assert "round 1 of 1: " in more.output


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


def test_the_epochs_that_the_message_names_are_enough(tmp_path, file):
    """Of 72 epochs the search has 48 and the first race 24. A fifth candidate then needs two more trainings of four."""
    file.write_text(NOISY.replace("1.1, 1.2]", "1.1, 1.2, 0.0, 1.3, 1.4, 1.5, 1.6, 1.7]"))
    home = Home(tmp_path / "home")
    ran = hpo("run", "--study", str(file), "--epochs", "72", *SEARCH, "--confirm", "2x2", home=home)
    assert ran.exit_code == 0 and len(listed(home)) == 6, ran.output
    more = hpo("resume", "--study", "noisy", "--epochs", "78", home=home)
    [epochs] = re.findall(r"two configurations of --confirm 2x2 need 8; give --epochs (\d+)\.", more.output)
    enough = hpo("resume", "--study", "noisy", "--epochs", epochs, home=home)
    assert enough.exit_code == 0 and best(home) == 0.0, enough.output
    assert listed(home)[6:] == [("trial 12", 1), ("trial 12", 2)]


def test_what_the_phase_has_trained_takes_nothing_from_an_ended_search(tmp_path, file):
    """Of 60 epochs the phase may need 8, so the search has 52. Beside its two trainings a new race leaves 44."""
    file.write_text(NOISY.replace('"grid"', '"random"').replace("hpo.Choice(GRID)", "hpo.Float(0.0, 1.0)"))
    home = Home(tmp_path / "home")
    ran = hpo("run", "--study", str(file), "--epochs", "60", *SEARCH, "--confirm", "1x1", home=home)
    assert ran.exit_code == 0 and len(listed(home)) == 2, ran.output
    before = [digest(home, study) for study in studies(home)]
    again = hpo("resume", "--study", "noisy", home=home)
    assert again.exit_code == 0 and "13 trials ended (13 complete)" in again.output
    assert [digest(home, study) for study in studies(home)] == before


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
    why = "study 'seedless' has no field train.seed, by which a training could be repeated under another seed"
    assert f"--confirm 2x2: {why}: give the configuration that field, or --confirm none." in error


def test_more_trials_than_there_are_are_refused(tmp_path, file):
    flags = ["--study", str(file), "--trials", "4", *SEARCH, "--confirm", "5x3"]
    error = refused(hpo("run", *flags, home=Home(tmp_path / "home")), 2)
    assert "--confirm 5x3: study 'noisy' has 4 trials, and 5 are to be confirmed: give --trials 5 or more, or " in error
    assert "--confirm 4x3." in error
