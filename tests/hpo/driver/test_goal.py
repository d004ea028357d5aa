"""A target and patience end a study at a tell, whoever trains it, and a resume with others goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from made_rows import trial_row
from places import HARNESS
from study_runs import drive, hpo, known, refused

import hpo as package
from hpo.declaration.goal import Goal, GoalWatch
from hpo.driver.loop import Driver
from hpo.errors import HpoError
from hpo.ledger import Ledger, queries
from hpo.ledger.rows import ProposedTrial
from hpo.search.forecast import Seen, forecast
from hpo.storage.home import Home
from hpo.verify import rules
from hpo.verify.report import Report
from hpo.workers.executors.local import Local

CURVES = str(HARNESS / "curves_study.py")
WINDOW = 4
TRAINED = {"reference": CURVES, "window": WINDOW, "sampler": "tpe", "strategy": "none"}
PROMOTED = {"reference": CURVES, "window": 2, "sampler": "random", "strategy": "asha-promote"}
MOST = 40

pytestmark = pytest.mark.whole


def row(number: int, value: float | None, state: str = "complete") -> ProposedTrial:
    return trial_row(number=number, state=state, values=None if value is None else [value])


def told(home: Home) -> list:
    """Returns the trials of the study in the order of tells."""
    with Ledger(home.storage).read() as connection:
        rows = [one for one in queries.trial_rows(connection, 1) if one.told is not None]
    return sorted(rows, key=lambda one: one.told)


def clean(home: Home) -> None:
    ledger, report = Ledger(home.storage), Report()
    with ledger.read() as connection:
        [name] = queries.study_names(connection)
        study = queries.study_row(connection, name)
    assert rules.check(ledger, study, report) and not report.differences, report.differences


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the values of a study without a goal by trial, and the digest of its first trials."""
    root = tmp_path_factory.mktemp("whole")
    drive(Home(root / "all"), trials=MOST, **TRAINED)
    values = {one.number: one.values[0] for one in told(Home(root / "all")) if one.state == "complete"}
    digests: dict[int, str] = {}

    def digest_of(trials: int) -> str:
        if trials not in digests:
            digests[trials] = drive(Home(root / str(trials)), trials=trials, **TRAINED)[0]
        return digests[trials]

    return values, digest_of


def records(values: dict[int, float]) -> list[int]:
    """Returns the trials that were better than all before them, but for the first one."""
    better = [
        number
        for number in sorted(values)
        if values[number] < min((values[n] for n in values if n < number), default=-1.0)
    ]
    assert len(better) > 1, "a study that finds nothing better shows nothing"
    return better


# The rule alone


def test_only_trials_with_a_value_wear_patience_out():
    watch = GoalWatch(Goal(target=0.5, patience=2), [{"metric": "loss", "direction": "minimize"}])
    for one in (row(0, 0.1, "pruned"), row(1, 0.1, "infeasible"), row(2, None, "failed"), row(3, 0.9)):
        watch.note(one)
    assert not watch.reached, "trials before the first complete one count for nothing"
    for one in (row(4, None, "failed"), row(5, None, "failed"), row(6, 0.2, "pruned"), row(7, 0.8), row(8, 0.8)):
        watch.note(one)
    assert not watch.reached
    watch.note(row(9, 0.85))
    assert watch.reached and "2 trials without improvement on trial 7, whose loss is 0.8" in watch.explain("s")
    watch.note(row(10, 0.4))
    assert "trial 7" in watch.explain("s"), "what ends later changes nothing"


@pytest.mark.parametrize(("direction", "values"), [("minimize", (0.9, 0.5)), ("maximize", (0.1, 0.5))])
def test_a_target_is_reached_by_its_own_value(direction, values):
    watch = GoalWatch(Goal(target=0.5), [{"metric": "m", "direction": direction}])
    watch.note(row(0, values[0]))
    assert not watch.reached and watch.explain("s") == ""
    watch.note(row(1, values[1]))
    assert "the target 0.5 is reached by trial 1, whose m is 0.5" in watch.explain("s")


@pytest.mark.parametrize(("direction", "sign"), [("minimize", 1), ("maximize", -1)])
def test_a_gain_is_forecast_of_all_that_was_told(direction, sign):
    """Oracle: the forecast of the trials before, at the first tell at which it lies below the bound."""
    losses = [1.0 / (number + 1) for number in range(MOST)]
    gains = [forecast([Seen(loss, complete=True) for loss in losses[: told + 1]]) for told in range(MOST)]
    bound = 0.9 * gains[15].gain
    last = next(told for told, expected in enumerate(gains) if expected is not None and expected.gain < bound)
    watch = GoalWatch(Goal(gain=bound), [{"metric": "m", "direction": direction}])
    for number in range(last):
        watch.note(row(number, sign * losses[number]))
        assert not watch.reached
    before = watch.ahead([row(last, sign * losses[last])])
    assert before.reached and not watch.reached, "a look ahead changes nothing"
    watch.note(row(last, sign * losses[last]))
    assert watch.reached and 15 < last < MOST - 1
    assert f"trial {last}, whose m is {sign * losses[last]:.6g}, by {gains[last].gain:.2g}" in watch.explain("s")
    assert "`hpo resume --study s --stop-when none` goes on" in watch.explain("s")


# Whole studies


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("workers", [0, 2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_target_gives_the_same_study_with_any_workers(tmp_path, whole, workers):
    """Oracle: a trial is told before the ask that lies a window after it, so that so many trials are asked for."""
    values, digest_of = whole
    number = records(values)[-2]
    target = values[number]
    home = Home(tmp_path / "home")
    executor = Local(workers) if workers else None
    digest, status, state, reason = drive(home, executor, trials=MOST, goal=Goal(target=target), **TRAINED)
    assert (state, sum(status.trials.values())) == ("complete", number + WINDOW)
    assert digest == digest_of(number + WINDOW)
    assert reason.startswith(f"the target {target:g} is reached by trial {number}, whose val/loss is ")
    clean(home)


def test_patience_ends_a_study_a_window_after_its_last_trial(tmp_path, whole):
    values, digest_of = whole
    best, since, last = float("inf"), 0, -1
    for number in sorted(values):
        since = 0 if values[number] < best else since + 1
        best = min(best, values[number])
        if since == 5:
            last = number
            break
    digest, _, state, reason = drive(Home(tmp_path / "home"), goal=Goal(patience=5), **TRAINED)
    assert (state, digest) == ("complete", digest_of(last + WINDOW))
    assert reason.startswith("5 trials without improvement on trial ")


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gain_gives_the_same_study_with_any_workers(tmp_path, whole, workers):
    values, digest_of = whole
    seen, gains = list[Seen](), dict[int, float]()  # the two trials without a value tell nothing
    for number in sorted(values):
        seen.append(Seen(values[number], complete=True))
        if (expected := forecast(seen)) is not None:
            gains[number] = expected.gain
    bound = 1.01 * sorted(gains.values())[len(gains) // 2]
    last = min(number for number, gain in gains.items() if gain < bound)
    home, executor = Home(tmp_path / "home"), Local(workers) if workers else None
    digest, _, state, reason = drive(home, executor, trials=MOST, goal=Goal(gain=bound), **TRAINED)
    assert (state, digest) == ("complete", digest_of(last + WINDOW))
    known = sum(number <= last for number in values)
    assert reason.startswith(f"after {known} trials with a value the next 20 were expected to improve on trial ")
    clean(home)


def test_a_resume_with_another_value_is_the_study_of_that_value(tmp_path, whole):
    values, digest_of = whole
    first, second = ((values[number], number) for number in records(values)[-2:])
    home = Home(tmp_path / "home")
    drive(home, goal=Goal(target=first[0]), trials=MOST, **TRAINED)
    again = drive(home, goal=Goal(target=first[0]), name="curves")
    assert again[0] == digest_of(first[1] + WINDOW), "the same goal asks for nothing more"
    assert "is reached by trial" in again[3]
    digest, _, state, _ = drive(home, goal=Goal(target=second[0]), name="curves")
    assert (state, digest) == ("complete", digest_of(second[1] + WINDOW))
    digest, status, _, reason = drive(home, name="curves")
    assert (digest, reason) == (digest_of(MOST), ""), "without a goal the budget ends it"
    assert sum(status.trials.values()) == MOST


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "point", ["driver.after_tell=kill@9", pytest.param("driver.before_ask_commit=kill@11", marks=pytest.mark.slow)]
)
def test_a_target_gives_the_same_study_when_it_is_killed(tmp_path, whole, point):
    values, digest_of = whole
    number = records(values)[-2]
    target = values[number]
    home = Home(tmp_path / "home")
    flags = ["--window", str(WINDOW), "--sampler", "tpe", "--strategy", "none", "--executor", "inline"]
    command = [sys.executable, "-m", "hpo", "run", "--study", CURVES, *flags, "--target", repr(target)]
    killed = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": point}
    done = subprocess.run([*command, "--home", str(home.root)], env=killed, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    result = hpo("resume", "--json", home=home)  # which knows the target by itself
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["digest"] == digest_of(number + WINDOW)
    assert facts["reason"].startswith(f"the target {target:g} is reached by trial {number}")
    clean(home)


def test_a_study_whose_target_is_reached_starts_nothing(tmp_path, whole):
    home = Home(tmp_path / "home")
    goal = Goal(target=whole[0][records(whole[0])[-2]])
    drive(home, goal=goal, trials=MOST, **TRAINED)
    idle: list[bool] = []
    drive(home, tick=lambda driver: idle.append(driver.idle), goal=goal, name="curves")
    assert not idle, "no round is driven"


def test_in_async_order_nothing_is_asked_once_the_target_is_told(tmp_path, whole):
    home = Home(tmp_path / "home")
    flags = TRAINED | {"order": "async", "window": 1, "sampler": "random"}
    drive(home, trials=MOST, **flags)
    values = {one.number: one.values[0] for one in told(home) if one.state == "complete"}
    number = records(values)[-2]
    target = values[number]
    other = Home(tmp_path / "other")
    _, status, state, _ = drive(other, trials=MOST, goal=Goal(target=target), **flags)
    assert (state, sum(status.trials.values())) == ("complete", number + 1)
    clean(other)


def test_paused_trials_are_retired_where_the_target_is_reached(tmp_path):
    home = Home(tmp_path / "home")
    drive(home, trials=MOST, **PROMOTED)
    complete = [one for one in told(home) if one.state == "complete"]
    target = complete[0].values[0]
    other = Home(tmp_path / "other")
    _, status, state, reason = drive(other, trials=MOST, goal=Goal(target=target), **PROMOTED)
    assert state == "complete" and reason.startswith(f"the target {target:g} is reached by trial ")
    assert sum(status.trials.values()) < MOST
    assert status.trials["pruned"] and not status.trials["paused"]
    clean(other)


# The doors


def test_the_goal_is_stored_changed_and_taken_back(home):
    run = ("run", "--study", CURVES, "--executor", "inline", "--strategy", "none", "--sampler", "random")
    result = hpo(*run, "--target", "1000", home=home)
    assert result.exit_code == 0 and "the target 1000 is reached by trial 0" in result.output, result.output
    trials = sum(known(home)[1].trials.values())
    assert "the target 1000 is reached by trial 0" in hpo("status", home=home).stdout
    result = hpo("resume", "--target", "none", "--trials", str(trials + 2), home=home)
    assert result.exit_code == 0 and "target" not in result.output, result.output
    assert sum(known(home)[1].trials.values()) == trials + 2
    handle = package.resume("curves", patience=2, trials=MOST, home=home.root, progress=False)
    assert "2 trials without improvement on trial " in hpo("status", home=home).stdout
    assert len(handle.trials()) < MOST
    assert "`hpo resume --study curves --patience 4" in hpo("status", home=home).stdout


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("target", "high", "give the value that the objective is to reach, or none"),
        ("target", "nan", "give the value that the objective is to reach, or none"),
        ("target", "inf", "give the value that the objective is to reach, or none"),
        ("target", True, "give the value that the objective is to reach, or none"),
        ("patience", "0", "give the number of trials without improvement"),
        ("patience", "-3", "give the number of trials without improvement"),
        ("patience", "2.5", "give the number of trials without improvement"),
        ("patience", "99999999999999999999", "give the number of trials without improvement"),
        ("patience", 2.5, "give the number of trials without improvement"),
        ("patience", True, "give the number of trials without improvement"),
        ("stop_when", "0.002", "give gain<VALUE, such as gain<0.002"),
        ("stop_when", "gain>0.002", "give gain<VALUE, such as gain<0.002"),
        ("stop_when", "gain<0", "give gain<VALUE, such as gain<0.002"),
        ("stop_when", "gain<nan", "give gain<VALUE, such as gain<0.002"),
        ("stop_when", 0.002, "give gain<VALUE, such as gain<0.002"),
    ],
)
def test_what_is_no_goal_is_refused_by_both_doors(home, option, value, sentence):
    with pytest.raises(HpoError, match=sentence) as caught:
        package.run(CURVES, trials=3, home=home.root, progress=False, executor="inline", **{option: value})
    assert re.match(rf"{option}='?{re.escape(str(value))}'?: ", str(caught.value)), str(caught.value)
    if isinstance(value, str):
        run = ("run", "--study", CURVES, "--trials", "3", f"--{option.replace('_', '-')}={value}")
        assert sentence in refused(hpo(*run, home=home), 2)
    assert not (home.root / "ledger.db").exists()


@pytest.mark.parametrize(
    ("reference", "flags", "sentence"),
    [
        (str(HARNESS / "several_study.py"), (), "objectives, which leave several best trials"),
        (str(HARNESS / "population_study.py"), (), "only trials of the last generation are complete"),
        (CURVES, ("--executor", "ray-tune"), "there Ray Tune decides"),
    ],
)
def test_a_goal_that_cannot_be_judged_is_refused(home, reference, flags, sentence):
    for option in (("--target", "0.5"), ("--patience", "3"), ("--stop-when", "gain<0.1")):
        error = refused(hpo("run", "--study", reference, "--trials", "12", *option, *flags, home=home), 2)
        assert f"{' '.join(option)}" in error and sentence in error, error


def test_a_new_study_may_be_bounded_by_a_goal_alone(home):
    result = hpo("run", "--study", CURVES, "--executor", "inline", home=home)
    assert "by --trials, --epochs, --time, --target, --patience or --stop-when" in refused(result, 2)
    drivers: list[Driver] = []
    _, _, state, _ = drive(home, tick=drivers.append, goal=Goal(patience=3), **TRAINED)
    assert state == "complete" and drivers
