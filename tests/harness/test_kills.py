"""Whatever is killed, whenever: the study ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from kill import (
    LANES,
    LANES_WORK,
    LOST,
    Golden,
    Run,
    check_sound,
    end_all,
    first_claim,
    golden_run,
    gone,
    kill_at,
    stop_in_a_trial,
    wait_for_progress,
    wait_until,
)
from sqlalchemy import String, select

from hpo.ledger.tables import attempts, checkpoints, events, reports
from hpo.worker import FENCED
from trainer.failpoint import NAMES

INSTANTS = int(os.environ.get("KILLS", "20"))  # seeded instants for each target in the slow sweep
SAMPLED_POINTS = ("worker.after_report_commit", "artifact.after_store")
ASYNCHRONOUS = ("-o", "train.checkpoint.asynchronous=true")  # which is no part of a digest
ASYNCHRONOUS_POINTS = ("checkpoint.after_copy", "checkpoint.before_commit")  # which other saves do not pass
PROMOTING = ("--strategy", "asha-promote", "--workers", "1", "--window", "1")
PROMOTION_POINTS = ("driver.after_thaw", "driver.after_retire")  # which no strategy that only stops passes
POPULATION = {"study": Path(__file__).with_name("population_study.py"), "trials": 12}
BREEDING = ("--workers", "2", "--sampler", "random")
LANES_STUDY = {"study": Path(__file__).with_name("lanes_study.py"), "name": "lanes", "work": LANES_WORK}
SIDE_BY_SIDE = ("--workers", "2", "--window", "8", "-o", f"train.lanes={LANES}", "-o", "pause=0.02")
SAVING = ("checkpoint.", "retention.", "worker.")


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Golden:
    return golden_run(tmp_path_factory.mktemp("golden") / "home")


@pytest.fixture(autouse=True)
def ended():
    yield
    end_all()


@pytest.fixture(scope="session")
def promoted(tmp_path_factory) -> Golden:
    return golden_run(tmp_path_factory.mktemp("promoted") / "home", *PROMOTING)


def _instants(count: int) -> list[tuple[str, int]]:
    return [(target, seed) for target in ("driver", "worker", "mirror") for seed in range(count)]


def check_kill(tmp_path, golden, target: str, seed: int) -> None:
    rng = random.Random(f"{target}{seed}")
    run = Run(tmp_path / "home")
    share = rng.random()
    fell = kill_at(run, target, share, golden, rng)
    print(f"\nSIGKILL {target} at {share:.3f} of the way: {fell}")
    check_sound(run, golden.digest, LOST[target])


@pytest.mark.parametrize(("target", "seed"), _instants(1))
def test_a_kill_at_a_sampled_instant_changes_nothing(tmp_path, golden, target, seed):
    check_kill(tmp_path, golden, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), _instants(INSTANTS)[1:])
def test_a_kill_at_any_instant_changes_nothing(tmp_path, golden, target, seed):
    check_kill(tmp_path, golden, target, seed)


def check_kill_at_point(tmp_path, golden, name: str, hit: int, *, asynchronous: bool = False) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    points = {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{name}=kill@{hit}", "HPO_FAILPOINTS_FIRED": str(fired)}
    run = Run(tmp_path / "home", environ=points)
    run.extra += ASYNCHRONOUS if asynchronous else ()
    process = run.run()
    process.communicate(timeout=120)
    assert (fired / name).exists(), f"{name} was never passed {hit} times"
    if name.startswith("driver."):
        assert process.returncode == -signal.SIGKILL
        run.finished(run.resume())
    else:
        assert process.returncode == 0
    periods = 2 if asynchronous else 1  # between checkpoints: a save is committed when the next one begins
    check_sound(run, golden.digest, periods * LOST.get(name.partition(".")[0], 1))


@pytest.mark.parametrize("name", SAMPLED_POINTS)
def test_a_kill_at_a_sampled_point_changes_nothing(tmp_path, golden, name):
    check_kill_at_point(tmp_path, golden, name, hit=2)


def check_kill_of_a_promotion(tmp_path, promoted, name: str, hit: int) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    points = {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{name}=kill@{hit}", "HPO_FAILPOINTS_FIRED": str(fired)}
    run = Run(tmp_path / "home", extra=PROMOTING, environ=points)
    output = run.run().communicate(timeout=120)[0]
    assert (fired / name).exists(), f"{name} was never passed {hit} times:\n{output}"
    if name.startswith("driver."):
        run.finished(run.start("resume", "--study", "tiny"))  # with as many workers as before
    check_sound(run, promoted.digest, LOST["worker"])


@pytest.mark.parametrize(("name", "hit"), [("driver.after_thaw", 1), ("driver.after_retire", 1)])
def test_a_kill_around_a_promotion_changes_nothing(tmp_path, promoted, name, hit):
    check_kill_of_a_promotion(tmp_path, promoted, name, hit)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [2, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("driver.after_thaw", "worker."))])
def test_a_kill_anywhere_among_promotions_changes_nothing(tmp_path, promoted, name, hit):
    check_kill_of_a_promotion(tmp_path, promoted, name, hit)


@pytest.fixture(scope="session")
def bred(tmp_path_factory) -> Golden:
    return golden_run(tmp_path_factory.mktemp("bred") / "home", *BREEDING, **POPULATION)


def check_kill_of_a_generation(tmp_path, bred, name: str, hit: int) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    points = {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{name}=kill@{hit}", "HPO_FAILPOINTS_FIRED": str(fired)}
    run = Run(tmp_path / "home", extra=BREEDING, environ=points, **POPULATION)
    output = run.run().communicate(timeout=120)[0]
    assert (fired / name).exists(), f"{name} was never passed {hit} times:\n{output}"
    if name.startswith("driver."):
        run.finished(run.resume())
    check_sound(run, bred.digest, LOST.get(name.partition(".")[0], 1))


@pytest.mark.parametrize(
    ("name", "hit"), [("driver.after_retire", 2), ("driver.after_ask", 2), ("worker.after_claim", 3)]
)
def test_a_kill_around_an_exploit_changes_nothing(tmp_path, bred, name, hit):
    """Before a generation is seen to have ended, once the next one is asked for, and as one of it begins."""
    check_kill_of_a_generation(tmp_path, bred, name, hit)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("driver.after_thaw", *ASYNCHRONOUS_POINTS)])
def test_a_kill_anywhere_among_generations_changes_nothing(tmp_path, bred, name, hit):
    check_kill_of_a_generation(tmp_path, bred, name, hit)


@pytest.fixture(scope="session")
def fused(tmp_path_factory) -> Golden:
    """By one worker whose lanes are four."""
    extra = ("--workers", "1", *SIDE_BY_SIDE[2:])
    return golden_run(tmp_path_factory.mktemp("fused") / "home", *extra, **LANES_STUDY)


def check_kill_of_lanes(tmp_path, fused, target: str, seed: int) -> None:
    """All lanes of a worker die with it."""
    rng = random.Random(f"lanes {target}{seed}")
    run = Run(tmp_path / "home", extra=SIDE_BY_SIDE, **LANES_STUDY)
    share = rng.random()
    fell = kill_at(run, target, share, fused, rng)
    print(f"\nSIGKILL {target} at {share:.3f} of the way: {fell}")
    check_sound(run, fused.digest, LOST[target])


@pytest.mark.parametrize(("target", "seed"), [("worker", 0)])
def test_a_kill_of_lanes_at_a_sampled_instant_changes_nothing(tmp_path, fused, target, seed):
    check_kill_of_lanes(tmp_path, fused, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), _instants(INSTANTS)[1:])
def test_a_kill_of_lanes_at_any_instant_changes_nothing(tmp_path, fused, target, seed):
    check_kill_of_lanes(tmp_path, fused, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if name not in (*ASYNCHRONOUS_POINTS, *PROMOTION_POINTS) and "artifact" not in name],
)
def test_a_kill_of_lanes_at_any_named_point_changes_nothing(tmp_path, fused, name, hit):
    fired = tmp_path / "fired"
    fired.mkdir()
    points = {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{name}=kill@{hit}", "HPO_FAILPOINTS_FIRED": str(fired)}
    run = Run(tmp_path / "home", extra=SIDE_BY_SIDE, environ=points, **LANES_STUDY)
    output = run.run().communicate(timeout=120)[0]
    assert (fired / name).exists(), f"{name} was never passed {hit} times:\n{output}"
    if name.startswith("driver."):
        run.finished(run.resume())
    check_sound(run, fused.digest, LOST.get(name.partition(".")[0], 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_lanes_that_were_told_to_leave_train_nothing_again(tmp_path, fused, number):
    run = Run(tmp_path / "home", extra=SIDE_BY_SIDE, **LANES_STUDY)
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", fused.values // 3, random.Random(0))
    driver.send_signal(number)
    run.finished(driver, 128 + number)
    assert run.status()["trials"]["running"] == 0
    assert not run.query(select(attempts.c.fence).where(attempts.c.outcome.is_(None)))
    run.finished(run.resume())
    check_sound(run, fused.digest, lost=0)


@pytest.mark.parametrize("name", ASYNCHRONOUS_POINTS[1:])
def test_a_kill_around_a_save_in_the_background_changes_nothing(tmp_path, golden, name):
    """The golden run waits for its saves."""
    check_kill_at_point(tmp_path, golden, name, hit=2, asynchronous=True)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ASYNCHRONOUS_POINTS + PROMOTION_POINTS])
def test_a_kill_at_any_named_point_changes_nothing(tmp_path, golden, name, hit):
    check_kill_at_point(tmp_path, golden, name, hit)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(SAVING)])
def test_a_kill_at_any_point_of_saves_in_the_background_changes_nothing(tmp_path, golden, name, hit):
    check_kill_at_point(tmp_path, golden, name, hit, asynchronous=True)


def test_of_two_resumes_at_once_one_wins(tmp_path, golden):
    run = Run(tmp_path / "home")
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", golden.values // 3, random.Random(0))
    driver.kill()
    driver.communicate()
    both = [run.resume(), run.resume()]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 3], outputs
    loser = codes.index(3)
    assert f"pid {both[1 - loser].pid}, since 20" in outputs[loser]
    check_sound(run, golden.digest, LOST["driver"])


def rows_of(run: Run, trial_id: int, fence: int) -> list[list]:
    """All that one attempt has written; the next one may delete its checkpoints, and no more."""
    c = checkpoints.c
    saved = (c.trial_id, c.fence, c.path, c.sha256, c.size, c.step, c.epoch, c.metrics, c.at)
    of = {attempts: tuple(attempts.c), reports: tuple(reports.c), checkpoints: saved}
    mine = [select(*kept).where(t.c.trial_id == trial_id, t.c.fence == fence) for t, kept in of.items()]
    told = select(events).where(
        events.c.trial_id == trial_id,
        events.c.uid.startswith(f"{trial_id}.{fence}.") | events.c.fields.cast(String).contains(f'"f{fence}.'),
    )
    return [sorted(map(repr, run.query(query))) for query in (*mine, told)]


def exit_code(pid: int) -> int:
    """Of a process whose parent has not asked for it yet: the last field of its line in /proc."""
    return os.waitstatus_to_exitcode(int(Path(f"/proc/{pid}/stat").read_text().split()[-1]))


def test_a_worker_stopped_past_its_lease_is_fenced_and_writes_nothing(tmp_path, golden):
    run = Run(tmp_path / "home", extra=("--workers", "2", "--window", "4", "-o", "pause=0.03"))
    run.environ["HPO_LEASE_SECONDS"] = "2"
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "worker", 4, random.Random(0))
    pid, trial_id, fence = stop_in_a_trial(run)
    lost = select(events.c.id).where(events.c.kind == "worker_lost", events.c.trial_id == trial_id)
    wait_until(lambda: run.query(lost), driver, 30)  # a silent worker does not keep its trial
    before = rows_of(run, trial_id, fence)
    assert all(before), list(map(len, before))
    driver.send_signal(signal.SIGSTOP)  # so that it does not reap the worker
    os.kill(pid, signal.SIGCONT)
    assert gone([pid], 60), "a fenced worker goes on"
    assert exit_code(pid) == FENCED
    driver.send_signal(signal.SIGCONT)
    assert rows_of(run, trial_id, fence) == before
    run.finished(driver)
    assert rows_of(run, trial_id, fence) == before
    check_sound(run, golden.digest, lost=2)  # what the others trained again, and what it did before it knew


def test_ctrl_c_once_leaves_a_study_that_resumes(tmp_path, golden):
    run = Run(tmp_path / "home")
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", golden.values // 3, random.Random(0))
    driver.send_signal(signal.SIGINT)
    run.finished(driver, 130)
    status = run.status()
    assert status["state"] == "interrupted"
    assert status["trials"]["running"] == 0
    assert not run.query(select(attempts.c.fence).where(attempts.c.outcome.is_(None)))
    run.finished(run.resume())
    check_sound(run, golden.digest, lost=0)


def test_ctrl_c_twice_ends_at_once_and_the_study_resumes(tmp_path, golden):
    run = Run(tmp_path / "home")
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", golden.values // 3, random.Random(0))
    driver.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two signals that wait together are one
    driver.send_signal(signal.SIGINT)
    started = time.monotonic()
    run.finished(driver, 130)
    assert time.monotonic() - started < 5
    run.finished(run.resume())
    check_sound(run, golden.digest, LOST["driver"])
