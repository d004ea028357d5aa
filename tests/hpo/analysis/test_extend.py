"""`hpo extend`: a trial goes on from its checkpoint as if it had been one training, in a study of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from math import cos, pi
from pathlib import Path

import pytest
from places import HARNESS
from study_runs import hpo, refused

from hpo.analysis.report import data
from hpo.ledger import Ledger, queries
from hpo.storage.home import Home
from hpo.verify import verify

TINY = str(HARNESS / "tiny_study.py")
SET = ("-o", "pause=0", "-o", "train.early_stopping.patience=99")
LONG = 7

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]


def run(home: Home, *flags: str, trials: int = 2, study: str = TINY) -> None:
    line = ("run", "--study", study, "--trials", str(trials), "--executor", "inline", "--sampler", "random")
    result = hpo(*line, "--strategy", "none", *SET, *flags, home=home)
    assert result.exit_code == 0, result.output


def losses(home: Home, study: str, number: int) -> dict[int, float]:
    """Returns the validation loss of a trial by epoch."""
    with Ledger(home.storage).read() as connection:
        rows = queries.curves(connection, queries.study_row(connection, study).id, ["val/loss"], [number])
        return {epoch: value for _, _, _, epoch, value in rows if epoch is not None}


@pytest.fixture(scope="module")
def begun(tmp_path_factory, process) -> Home:
    """A study of two trials of four epochs."""
    home = Home(tmp_path_factory.mktemp("extended") / "home")
    run(home)
    return home


def test_an_extended_trial_is_the_longer_training_to_the_bit(begun):
    """Oracle: the same configuration, trained for as long from the beginning."""
    run(begun, "--name", "whole", "-o", f"train.num_epochs={LONG}")
    said = hpo("extend", "1", "--study", "tiny", "-o", f"train.num_epochs={LONG}", "--executor", "inline", home=begun)
    assert said.exit_code == 0, said.output
    assert "trial 1 goes on from epoch 4, step 16, to epoch 7" in said.stderr
    expected, long = losses(begun, "whole", 1), losses(begun, "tiny-extend", 0)
    assert sorted(long) == [5, 6, 7] and long == {epoch: expected[epoch] for epoch in long}
    assert losses(begun, "tiny", 1) == {epoch: expected[epoch] for epoch in (1, 2, 3, 4)}
    with Ledger(begun.storage).read() as connection:
        row = queries.study_row(connection, "tiny-extend")
        assert row.spec.listed_of == "tiny" and row.spec.listed[0]["label"] == "trial 1 extended"
    line = f"extended: trial 1 to epoch 7, val/loss {long[7]:.6g} (study tiny-extend, trial 0)"
    assert said.stdout.splitlines()[-1] == line
    assert line in hpo("best", "--study", "tiny", home=begun).stdout.splitlines()
    ledger = Ledger(begun.storage)
    report = data.read(ledger, begun, "tiny")
    assert report.answer["extended"] == [line] and report.sure["confirm"] == [], "it is no confirmation"
    ledger.close()
    assert verify(begun, begun.storage).differences == []


def test_a_second_trial_and_the_same_one_again_join_the_study(begun):
    extend = ("extend", "--study", "tiny", "--executor", "inline", "--name", "more", "--json")
    for number, epochs in ((0, 5), (1, 6), (0, 5)):
        result = hpo(*extend, str(number), "-o", f"train.num_epochs={epochs}", home=begun)
        assert result.exit_code == 0, result.output
        [row] = json.loads(result.stdout[result.stdout.index("[\n") :] if "[\n" in result.stdout else result.stdout)
        assert (row["trial"], row["study"], row["epoch"]) == (number, "more", epochs)
    with Ledger(begun.storage).read() as connection:
        assert len(queries.trial_rows(connection, queries.study_row(connection, "more").id)) == 2
    assert "study 'more' begins from a checkpoint" in refused(hpo("rm", "1", "--study", "tiny", "--yes", home=begun), 2)


def test_a_schedule_of_the_whole_run_goes_on_by_its_new_length(tmp_path):
    home = Home(tmp_path / "home")
    file = tmp_path / "tiny.py"
    plateau = 'ScheduleConfig(name="plateau", warmup_steps=3, plateau=PlateauConfig(monitor="val/loss", patience=0))'
    file.write_text(Path(TINY).read_text().replace(plateau, 'ScheduleConfig(name="cosine")'))
    run(home, trials=1, study=str(file))
    result = hpo("extend", "0", "--study", "tiny", "-o", f"train.num_epochs={LONG}", "--executor", "inline", home=home)
    assert result.exit_code == 0, result.output
    assert (
        "its schedule cosine depends on train.num_epochs: from step 16 it goes on as that of 7 epochs, and up to there "
        "it was that of 4"
    ) in result.stderr
    with Ledger(home.storage).read() as connection:
        study = queries.study_row(connection, "tiny-extend").id
        rates = {step: value for _, _, step, _, value in queries.curves(connection, study, ["train/lr"])}
        [trial] = queries.trial_rows(connection, study)
        [config] = queries.configs(connection, [trial.id]).values()
    lr, total = config["train"]["optim"]["lr"], 4 * LONG
    assert rates == pytest.approx({step: lr * (1 + cos(pi * (step - 1) / total)) / 2 for step in (20, 24, 28)})


def test_killed_and_resumed_it_ends_as_the_one_left_alone(begun):
    extend = ["extend", "0", "--study", "tiny", "-o", "train.num_epochs=6", "--executor", "inline"]
    assert hpo(*extend, "--name", "alone", home=begun).exit_code == 0
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@3"}
    line = [sys.executable, "-m", "hpo", *extend, "--name", "killed", "--home", str(begun.root)]
    done = subprocess.run(line, env=environ, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert hpo("resume", "--study", "killed", home=begun).exit_code == 0
    assert losses(begun, "killed", 0) == losses(begun, "alone", 0)
    with Ledger(begun.storage).read() as connection:
        digests = {queries.digest(connection, queries.study_row(connection, name)) for name in ("killed", "alone")}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("9", "-o", "train.num_epochs=9"), "study 'tiny' has no trial 9: it has trials 0 to 1"),
        (("0",), "trial 0 of study 'tiny' has trained 4 epochs: say how many it is to have in all, such as"),
        (("0", "-o", "train.num_epochs=4"), "-o train.num_epochs=4: trial 0 of study 'tiny' has trained 4 epochs"),
        (("0", "-o", "train.num_epochs=many"), "train.num_epochs"),
        (("0", "-o", "train.nosuch=1"), "train.nosuch"),
        (("0", "-o", "train.num_epochs=9", "-o", "train.resume_from=/x"), "-o train.resume_from: a trial that goes on"),
        (("0", "-o", "train.num_epochs=9", "--executor", "ray-tune"), "--executor ray-tune"),
        (("0", "-o", "train.num_epochs=9", "--name", "tiny"), "study 'tiny' is there already"),
    ],
)
def test_bad_input_is_one_sentence(begun, arguments, sentence):
    error = refused(hpo("extend", "--study", "tiny", *arguments, home=begun), 2)
    assert sentence in error and len(error.strip().splitlines()) <= 2, error


CROSSING = """
import hpo

QUEUE = [{"begin": 0.1, "end": 0.9}, {"begin": 0.5, "end": 0.2}, {"begin": 0.7, "end": 0.1}]
SPACE = {"begin": hpo.Float(0.0, 1.0), "end": hpo.Float(0.0, 1.0)}

@hpo.study(space=SPACE, minimize="loss", num_epochs=6, enqueue=QUEUE)
def crossing(trial):
    for epoch in range(1, 7):
        loss = trial.params.begin + (trial.params.end - trial.params.begin) * epoch / 6
        if trial.report(epoch, {"loss": loss}):
            return
"""


def test_a_stopped_trial_that_stood_better_is_named_and_finished(tmp_path):
    """Trial 0 leads at the rung and ends at 0.9, after both others have been stopped with less."""
    home = Home(tmp_path / "home")
    file = tmp_path / "crossing.py"
    file.write_text(CROSSING)
    line = ["run", "--study", str(file), "--trials", "3", "--executor", "inline", "--window", "1", "--finish", "none"]
    ran = hpo(*line, home=home)
    assert ran.exit_code == 0, ran.output
    with Ledger(home.storage).read() as connection:
        rows = queries.trial_rows(connection, queries.study_row(connection, "crossing").id)
    assert [(row.state, row.epoch) for row in rows] == [("complete", 6), ("pruned", 2), ("pruned", 2)]
    ahead = "ahead of the best when it stopped: trial 1, loss 0.4 at epoch 2, and 1 more stopped trial; "
    assert ahead + "`hpo extend 1 --study crossing" in ran.output
    assert ahead in hpo("best", home=home).stdout
    with closing(Ledger(home.storage)) as ledger:
        assert data.read(ledger, home, "crossing").answer["stopped_ahead"].startswith(ahead)
    finished = hpo("extend", "1", "--executor", "inline", home=home)
    assert finished.exit_code == 0, finished.output
    assert "trial 1 begins again to epoch 6: it keeps no checkpoint to go on from" in finished.stderr
    best = hpo("best", "--study", "crossing", home=home).stdout
    assert "crossing, trial 1: loss 0.2\n  trained to epoch 6 after it was stopped at epoch 2" in best
    assert "ahead of the best when it stopped" not in best, "0.5 is behind 0.2"


def test_a_stopped_trial_of_the_shared_trainer_goes_on_to_its_own_end(tmp_path):
    """Oracle: the same configuration under no strategy. Of five epochs the second is a rung."""
    home = Home(tmp_path / "home")
    five = (*SET, "-o", "train.num_epochs=5", "--sampler", "random")
    line = ("run", "--study", TINY, "--trials", "6", "--executor", "inline", "--finish", "none", *five)
    assert hpo(*line, home=home).exit_code == 0
    assert hpo(*line, "--strategy", "none", "--name", "whole", home=home).exit_code == 0
    with Ledger(home.storage).read() as connection:
        rows = queries.trial_rows(connection, queries.study_row(connection, "tiny").id)
    number = next(row.number for row in rows if row.state == "pruned")
    finished = hpo("extend", str(number), "--study", "tiny", "--executor", "inline", home=home)
    assert finished.exit_code == 0, finished.output
    whole, rest = losses(home, "whole", number), losses(home, "tiny-extend", 0)
    assert min(rest) > 1 and max(rest) == 5 and rest == {epoch: whole[epoch] for epoch in rest}
