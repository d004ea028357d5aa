"""Whatever is killed, whenever: the study ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from function_study import STEPS
from kill import (
    AT_ONCE,
    LANES,
    LANES_WORK,
    LOST,
    Golden,
    Run,
    Work,
    check_sound,
    end_all,
    first_claim,
    gone,
    kill_at,
    kill_at_points,
    shared_golden,
    stop_in_a_trial,
    wait_for_progress,
    wait_until,
)
from processes import processes_of, runs
from sqlalchemy import String, select

import hpo as library
from hpo.ledger.database.tables import attempts, checkpoints, events, reports, workers
from hpo.storage.home import Home
from hpo.workers.worker import FENCED
from trainer.runtime import failpoint

INSTANTS = int(os.environ.get("KILLS", "20"))  # seeded instants for each target in the slow sweep
SAMPLED_POINTS = {"worker.after_report_commit": 2, "artifact.after_store": 2}
SAMPLED_PROMOTIONS = {"driver.after_thaw": 1, "driver.after_retire": 1}
SAMPLED_GENERATIONS = {"driver.after_retire": 2, "driver.after_ask": 2, "worker.after_claim": 3}
ASYNCHRONOUS = ("-o", "train.checkpoint.asynchronous=true")  # which is no part of a digest
ASYNCHRONOUS_POINTS = ("checkpoint.after_copy", "checkpoint.before_commit")  # which other saves do not pass
PROMOTING = ("--strategy", "asha-promote", "--workers", "1", "--window", "1", *AT_ONCE)
PROMOTION_POINTS = ("driver.after_thaw", "driver.after_retire")  # which no strategy that only stops passes
PAUSING = ("--strategy", "asha-promote", "--order", "ordered", "--window", "4", *AT_ONCE)
SAMPLED_STEPS = {"driver.after_thaw": 2, "worker.after_finish": 3}
POPULATION = {"study": Path(__file__).with_name("population_study.py"), "trials": 12}
BREEDING = ("--workers", "2", "--sampler", "random", *AT_ONCE)
ONE_SIZE = {"train.lanes": LANES, "model.hidden_size": 8}  # trials of several sizes would train one by one
LANES_STUDY = {
    "study": Path(__file__).with_name("lanes_study.py"),
    "name": "lanes",
    "work": LANES_WORK,
    "extra": ("--executor", "local", "--workers", "2"),
    "begun": {"window": 8, "overrides": ONE_SIZE | {"pause": 0.02}},  # the command would not, as trials may be stopped
}
FUNCTION = {"study": Path(__file__).with_name("function_study.py"), "work": Work("steps", STEPS, 2 * STEPS)}
COMMAND = {"study": Path(__file__).with_name("command_study.yaml"), "work": Work("steps", STEPS, 2 * STEPS)}
OF_SEVERAL = ("worker.after_claim", "driver.after_ask", "driver.after_tell")  # trials at once, so passed twice at least
_ELSEWHERE = ("removal.", "promote.", "alerts.", "mirror.after_append", "reconcile.")  # which a run does not pass
NAMES = [name for name in failpoint.NAMES if not name.startswith(_ELSEWHERE)]
SAVING = ("checkpoint.", "retention.", "worker.")


@pytest.fixture(scope="session")
def golden(tmp_path_factory, process) -> Golden:
    return shared_golden(tmp_path_factory, "plain")


@pytest.fixture(scope="session")
def promoted(tmp_path_factory, process) -> Golden:
    return shared_golden(tmp_path_factory, "promoted", *PROMOTING)


@pytest.fixture(scope="session")
def paused(tmp_path_factory, process) -> Golden:
    return shared_golden(tmp_path_factory, "paused", *PAUSING, "--workers", "1")


@pytest.fixture(scope="session")
def bred(tmp_path_factory, process) -> Golden:
    return shared_golden(tmp_path_factory, "bred", *BREEDING, **POPULATION)


@pytest.fixture(scope="session")
def fused(tmp_path_factory, process) -> Golden:
    """By one worker whose lanes are four."""
    return shared_golden(tmp_path_factory, "fused", "--executor", "local", "--workers", "1", **LANES_STUDY)


@pytest.fixture(scope="session")
def of_function(tmp_path_factory, process) -> Golden:
    """The study of a function."""
    return shared_golden(tmp_path_factory, "function", **FUNCTION)


@pytest.fixture(scope="session")
def of_command(tmp_path_factory, process) -> Golden:
    """The study of a program."""
    return shared_golden(tmp_path_factory, "command", **COMMAND)


@pytest.fixture(autouse=True)
def ended():
    yield
    end_all()


def _instants(count: int) -> list[tuple[str, int]]:
    return [(target, seed) for target in ("driver", "worker", "mirror", "prepared") for seed in range(count)]


# At seeded instants.


@pytest.mark.usefixtures("process")
def test_sampled_kills_of_a_worker_and_the_mirror_change_nothing(tmp_path, golden):
    """The test of two resumes at once kills the driver."""
    rng = random.Random("sampled")
    run = Run(tmp_path / "home")
    print(f"\nSIGKILL {kill_at(run, {target: rng.random() for target in ('worker', 'mirror')}, golden, rng)}")
    check_sound(run, golden.digest, LOST["worker"] + LOST["mirror"])


@pytest.mark.usefixtures("process")
def test_a_worker_killed_after_what_it_was_forked_from_is_replaced(tmp_path, golden):
    """By one that is spawned."""
    run = Run(tmp_path / "home")
    print(f"\nSIGKILL {kill_at(run, {'prepared': 0.2, 'worker': 0.4}, golden, random.Random('prepared'))}")
    check_sound(run, golden.digest, LOST["worker"])


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), _instants(INSTANTS))
def test_a_kill_at_any_instant_changes_nothing(tmp_path, golden, target, seed):
    rng = random.Random(f"{target}{seed}")
    run = Run(tmp_path / "home")
    print(f"\nSIGKILL {kill_at(run, {target: rng.random()}, golden, rng)}")
    check_sound(run, golden.digest, LOST[target])


def check_kill_of_lanes(tmp_path, fused, target: str, seed: int) -> None:
    """All lanes of a worker die with it."""
    rng = random.Random(f"lanes {target}{seed}")
    run = Run(tmp_path / "home", **LANES_STUDY)
    print(f"\nSIGKILL {kill_at(run, {target: rng.random()}, fused, rng)}")
    check_sound(run, fused.digest, LOST[target])


@pytest.mark.usefixtures("process")
def test_a_kill_of_lanes_at_a_sampled_instant_changes_nothing(tmp_path, fused):
    check_kill_of_lanes(tmp_path, fused, "worker", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), _instants(INSTANTS)[1:])
def test_a_kill_of_lanes_at_any_instant_changes_nothing(tmp_path, fused, target, seed):
    check_kill_of_lanes(tmp_path, fused, target, seed)


def check_kill_of_function(tmp_path, of_function, targets: tuple[str, ...], seed: int) -> None:
    rng = random.Random(f"function {targets} {seed}")
    run = Run(tmp_path / "home", **FUNCTION)
    print(f"\nSIGKILL {kill_at(run, {target: rng.random() for target in targets}, of_function, rng)}")
    check_sound(run, of_function.digest, sum(LOST[target] for target in targets))
    rows = library.open(home=run.home).trials()
    assert rows["tags.reached"].tolist() == rows["epoch"].astype(str).tolist(), "each tag is the last that was given"


@pytest.mark.usefixtures("process")
def test_sampled_kills_of_a_functions_study_change_nothing(tmp_path, of_function):
    check_kill_of_function(tmp_path, of_function, ("worker", "driver"), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), _instants(INSTANTS))
def test_a_kill_of_a_functions_study_at_any_instant_changes_nothing(tmp_path, of_function, target, seed):
    check_kill_of_function(tmp_path, of_function, (target,), seed)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ASYNCHRONOUS_POINTS + PROMOTION_POINTS])
def test_a_kill_of_a_functions_study_at_any_point_changes_nothing(tmp_path, of_function, name, hit):
    check_kills(Run(tmp_path / "home", **FUNCTION), of_function, {name: hit})


def check_kill_of_command(tmp_path, of_command, targets: tuple[str, ...], seed: int) -> None:
    """Programs die with their workers: none is left once the study has ended."""
    rng = random.Random(f"command {targets} {seed}")
    run = Run(tmp_path / "home", **COMMAND)
    shares = sorted(0.9 * rng.random() for _ in targets)  # a program is there to be killed before the last tell alone
    print(f"\nSIGKILL {kill_at(run, dict(zip(targets, shares, strict=True)), of_command, rng)}")
    check_sound(run, of_command.digest, sum(LOST[target] for target in targets))
    log = f"TINY_LOG={run.home.with_suffix('.steps')}"
    assert not [one for one in psutil.process_iter() if log in _environ(one)]


def _environ(process: psutil.Process) -> list[str]:
    try:
        return [f"{name}={value}" for name, value in process.environ().items()]
    except psutil.Error:
        return []


@pytest.mark.usefixtures("process")
def test_sampled_kills_of_a_commands_study_change_nothing(tmp_path, of_command):
    check_kill_of_command(tmp_path, of_command, ("program", "worker", "driver"), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), _instants(INSTANTS) + [("program", seed) for seed in range(INSTANTS)])
def test_a_kill_of_a_commands_study_at_any_instant_changes_nothing(tmp_path, of_command, target, seed):
    check_kill_of_command(tmp_path, of_command, (target,), seed)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ASYNCHRONOUS_POINTS + PROMOTION_POINTS])
def test_a_kill_of_a_commands_study_at_any_point_changes_nothing(tmp_path, of_command, name, hit):
    check_kills(Run(tmp_path / "home", **COMMAND), of_command, {name: hit})


# At named points. The default suite kills one study at several of them.


def check_kills(run: Run, golden: Golden, points: dict[str, int]) -> None:
    check_sound(run, golden.digest, kill_at_points(run, points))


@pytest.mark.usefixtures("process")
def test_kills_at_sampled_points_change_nothing(tmp_path, golden):
    check_kills(Run(tmp_path / "home"), golden, SAMPLED_POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ASYNCHRONOUS_POINTS + PROMOTION_POINTS])
def test_a_kill_at_any_named_point_changes_nothing(tmp_path, golden, name, hit):
    check_kills(Run(tmp_path / "home"), golden, {name: hit})


def check_kills_in_the_background(tmp_path, golden, points: dict[str, int]) -> None:
    """The golden run waits for its saves; here each is committed when the next one begins, so two periods are lost."""
    run = Run(tmp_path / "home")
    run.extra += ASYNCHRONOUS
    check_sound(run, golden.digest, 2 * kill_at_points(run, points))


@pytest.mark.usefixtures("process")
def test_kills_around_saves_in_the_background_change_nothing(tmp_path, golden):
    check_kills_in_the_background(tmp_path, golden, dict.fromkeys(ASYNCHRONOUS_POINTS, 2))


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(SAVING)])
def test_a_kill_at_any_point_of_saves_in_the_background_changes_nothing(tmp_path, golden, name, hit):
    check_kills_in_the_background(tmp_path, golden, {name: hit})


def check_kills_among_promotions(tmp_path, promoted, points: dict[str, int]) -> None:
    """Resumed with as many workers as before, which is one."""
    run = Run(tmp_path / "home", extra=PROMOTING, resumed=())
    kill_at_points(run, points)
    check_sound(run, promoted.digest, len(points) * LOST["worker"])


@pytest.mark.usefixtures("process")
def test_kills_around_promotions_change_nothing(tmp_path, promoted):
    check_kills_among_promotions(tmp_path, promoted, SAMPLED_PROMOTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hit"),
    [
        *SAMPLED_PROMOTIONS.items(),
        *((name, hit) for name in NAMES if name.startswith(("driver.after_thaw", "worker.")) for hit in (2, 3)),
    ],
)
def test_a_kill_anywhere_among_promotions_changes_nothing(tmp_path, promoted, name, hit):
    check_kills_among_promotions(tmp_path, promoted, {name: hit})


def check_kills_among_steps(tmp_path, paused, points: dict[str, int]) -> None:
    """Trials pause in order: two workers, and three after a kill, train what one does."""
    run = Run(tmp_path / "home", extra=(*PAUSING, "--workers", "2"), resumed=("--workers", "3"))
    check_kills(run, paused, points)


@pytest.mark.usefixtures("process")
def test_kills_among_steps_change_nothing(tmp_path, paused):
    check_kills_among_steps(tmp_path, paused, SAMPLED_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NAMES
        if name.startswith(("driver.", "worker.")) and name not in ("driver.after_retire", "driver.after_tell")
    ],  # nothing is retired, and few trials end
)
def test_a_kill_anywhere_among_steps_changes_nothing(tmp_path, paused, name, hit):
    check_kills_among_steps(tmp_path, paused, {name: hit})


@pytest.mark.usefixtures("process")
def test_kills_around_exploits_change_nothing(tmp_path, bred):
    """Before a generation is seen to have ended, once the next one is asked for, and as one of it begins."""
    check_kills(Run(tmp_path / "home", extra=BREEDING, **POPULATION), bred, SAMPLED_GENERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hit"),
    [
        *SAMPLED_GENERATIONS.items(),
        *((name, hit) for name in NAMES if name not in ("driver.after_thaw", *ASYNCHRONOUS_POINTS) for hit in (1, 3)),
    ],
)
def test_a_kill_anywhere_among_generations_changes_nothing(tmp_path, bred, name, hit):
    check_kills(Run(tmp_path / "home", extra=BREEDING, **POPULATION), bred, {name: hit})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hit"),
    [
        (name, 2 if name in OF_SEVERAL and hit == 3 else hit)
        for name in NAMES
        if name not in (*ASYNCHRONOUS_POINTS, *PROMOTION_POINTS) and "artifact" not in name
        for hit in (1, 3)
    ],
)
def test_a_kill_of_lanes_at_any_named_point_changes_nothing(tmp_path, fused, name, hit):
    check_kills(Run(tmp_path / "home", **LANES_STUDY), fused, {name: hit})


# Signals that are obeyed, and drivers and workers that meet.


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_lanes_that_were_told_to_leave_train_nothing_again(tmp_path, fused, number):
    run = Run(tmp_path / "home", **LANES_STUDY)
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", fused.values // 3, random.Random(0))
    driver.send_signal(number)
    run.finished(driver, 128 + number)
    assert run.status()["trials"]["running"] == 0
    assert not run.query(select(attempts.c.fence).where(attempts.c.outcome.is_(None)))
    run.finished(run.resume())
    check_sound(run, fused.digest, lost=0)


@pytest.mark.usefixtures("process")
def test_of_two_resumes_at_once_one_wins_and_ctrl_c_twice_ends_it_at_once(tmp_path, golden):
    run = Run(tmp_path / "home")
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", golden.values // 3, random.Random(0))
    children = [pid for (pid,) in run.query(select(workers.c.pid))]
    driver.kill()
    run.finished(driver, -signal.SIGKILL)
    assert gone(children), "workers outlive their driver"
    both = [run.resume(), run.resume()]
    while not (ended := [process for process in both if process.poll() is not None]):
        time.sleep(0.02)
    [loser], [winner] = ended, [process for process in both if process not in ended]
    assert f"pid {winner.pid}, since 20" in run.finished(loser, 3)
    wait_for_progress(run, winner, "driver", golden.values // 2, random.Random(0))
    winner.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two signals that wait together are one
    winner.send_signal(signal.SIGINT)
    started = time.monotonic()
    run.finished(winner, 130)
    assert time.monotonic() - started < 30  # on a busy machine; the study would train for longer
    run.finished(run.resume())
    check_sound(run, golden.digest, 2 * LOST["driver"])


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


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("stay", [False, True])
def test_a_worker_stopped_past_its_lease_is_fenced_and_writes_nothing(stay, tmp_path, golden):
    """One that has joined: its driver does not kill it, so that it may go on at any time, with another trial or not."""
    run = Run(tmp_path / "home", extra=("--workers", "1", "--window", "4", "-o", "pause=0.03"))
    run.environ["HPO_LEASE_SECONDS"] = "2"
    driver = run.run()
    first_claim(run, driver)
    joined = run.start("worker", "--study", run.name, "--storage", Home(run.home).storage, *["--stay"] * stay)
    pid, trial_id, fence = stop_in_a_trial(run, workers.c.pid == joined.pid)
    stopped = (attempts.c.trial_id == trial_id, attempts.c.fence == fence)
    lost = select(attempts.c.fence).where(*stopped, attempts.c.outcome == "lost")
    wait_until(lambda: run.glance(lost), driver)  # a silent worker does not keep its trial
    before = rows_of(run, trial_id, fence)
    assert all(before), list(map(len, before))
    os.kill(pid, signal.SIGCONT)
    if not stay:
        run.finished(joined, FENCED)
        assert rows_of(run, trial_id, fence) == before
    said = run.finished(driver)
    if stay:
        output = run.finished(joined)
        assert "fenced: " in output and "begins afresh after" in output and f"study {run.name} is complete" in output
    assert re.search(rf"worker pid {pid} on \S+ has been silent for 2 s: it hangs, or its host is down", said)
    assert rows_of(run, trial_id, fence) == before
    check_sound(run, golden.digest, lost=2)  # what the others trained again, and what it did before it knew


@pytest.mark.usefixtures("process")
def test_workers_that_are_stopped_for_ever_are_named_killed_and_replaced(tmp_path, golden):
    run = Run(tmp_path / "home", extra=("--workers", "2", "--window", "4", "-o", "pause=0.03"))
    run.environ["HPO_LEASE_SECONDS"] = "2"
    driver = run.run()
    first_claim(run, driver)
    pid = wait_for_progress(run, driver, "worker", 4, random.Random(0))
    stopped = [child.pid for child in psutil.Process(driver.pid).children() if runs(child, "hpo.workers.worker")]
    assert pid in stopped
    for worker in stopped:  # wherever they are, in a transaction too: SQLite's lock is stopped with it
        os.kill(worker, signal.SIGSTOP)
    said = run.finished(driver)
    assert gone(stopped)
    for worker in stopped:
        assert re.search(rf"worker pid {worker} .* for 2 s.*: it is killed, and another takes its place\.", said), said
    check_sound(run, golden.digest, lost=2)


@pytest.mark.usefixtures("process")
def test_sigterm_to_all_processes_at_once_leaves_a_study_that_resumes(tmp_path, golden):
    """As a container or a unit of systemd is stopped: MLflow gets all the same what workers report as they leave."""
    run = Run(tmp_path / "home", extra=("--workers", "2", "--window", "4", "-o", "pause=0.03"))
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "mirror", golden.values // 3, random.Random(0))
    for process in processes_of(driver.pid):
        process.terminate()
    said = run.finished(driver, 128 + signal.SIGTERM)
    assert "goes on from the last checkpoints" in said and "Traceback" not in said
    if "behind" in said:  # the mirror had no processor in time, and the run says so
        run.says("sync")
    assert run.status()["state"] == "interrupted" and run.says("verify").startswith("0 differences")
    run.finished(run.resume())
    check_sound(run, golden.digest, lost=0)


@pytest.mark.usefixtures("process")
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
    assert ("lost",) not in run.query(select(attempts.c.outcome)), "a worker that is told to leave saves its trial"
    run.finished(run.resume())
    check_sound(run, golden.digest, lost=0)
