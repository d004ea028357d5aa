"""A study whose trials are two ranks each, from the command, through kills of every kind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from kill import STUDY, Run, wait_until
from processes import runs
from sqlalchemy import select
from tiny_runs import drive

from hpo import load
from hpo.ledger import Ledger
from hpo.ledger.database.tables import asks, attempts, events, reports, trials
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

RANKS = ("-o", "train.parallel.data=2", "-o", "train.micro_batch_size=3", "-o", "pause=0.01", "--seed", "1")
TRIALS = 3
TWO = {"train.parallel.data": 2, "train.micro_batch_size": 3, "pause": 0.0}


def found(ledger: Ledger, *columns, where=None) -> list[tuple]:
    query = select(*columns) if where is None else select(*columns).where(where)
    return [tuple(row) for row in ledger.look(lambda connection: connection.execute(query).all())]


def run_in(home: Path) -> Run:
    return Run(home, TRIALS, ("--workers", "1", "--window", "2", *RANKS))


@pytest.fixture(scope="module")
def golden(tmp_path_factory, ranks) -> Run:
    run = run_in(tmp_path_factory.mktemp("golden") / "home")
    run.finished(run.run(), timeout=240)
    return run


def processes(driver: psutil.Process, module: str) -> list[psutil.Process]:
    return [process for process in driver.children(recursive=True) if runs(process, module)]


def wait_for_values(run: Run, more: int) -> None:
    """Until the ledger has taken so many more values: the trial at hand is in the middle of something."""
    wanted = len(run.query(select(reports.c.value))) + more
    deadline = time.monotonic() + 120
    while len(run.query(select(reports.c.value))) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_strategy_prunes_and_the_ledger_counts_ranks(golden):
    rows = golden.query(select(trials.c.state, trials.c.ranks, trials.c.epoch))
    assert {ranks for _, ranks, _ in rows} == {2}
    assert {state for state, _, _ in rows} == {"complete", "pruned"}, rows


def test_mlflow_shows_what_each_rank_measured_of_itself(golden):
    """Beside the summary, each epoch, and outside of what a study's digest is taken of."""
    import mlflow

    client = mlflow.MlflowClient(Home(golden.home).tracking_uri)
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = [run for run in client.search_runs(experiments) if "time/epoch_seconds" in run.data.metrics]
    epochs = dict(golden.query(select(trials.c.number, trials.c.epoch)))
    assert len(runs) == len(epochs) == TRIALS
    for run in runs:
        curves = {
            key: [point.value for point in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
            if key.startswith("system/rank/")
        }
        names = {key.split("/", 3)[3] for key in curves}
        assert names >= {"memory_mb", "step_seconds", "data_share"} and "system/memory_mb" in run.data.metrics
        assert set(curves) == {f"system/rank/{rank}/{name}" for rank in (0, 1) for name in names}
        done = epochs[int(run.data.tags["hpo.trial"])]
        assert {len(curve) for key, curve in curves.items() if "memory" in key} == {done}
        for rank in (0, 1):
            memory, seconds = curves[f"system/rank/{rank}/memory_mb"], curves[f"system/rank/{rank}/step_seconds"]
            assert memory == sorted(memory) and 50 < memory[0] < 100_000 and min(seconds) > 0
        assert curves["system/rank/0/memory_mb"] != curves["system/rank/1/memory_mb"], "two processes"


@pytest.mark.slow
def test_two_at_a_time_wait_at_their_rungs_and_are_the_same_study(golden, tmp_path):
    run = Run(tmp_path / "home", TRIALS, ("--workers", "2", "--window", "2", *RANKS))
    driver = run.run()
    wait_for_values(run, 1)
    [first, *_] = processes(psutil.Process(driver.pid), "hpo.workers.worker")
    first.suspend()  # and so what its trial has to say; its lease lives on for a while
    time.sleep(3)
    first.resume()
    run.finished(driver, timeout=240)
    assert run.status()["digest"] == golden.status()["digest"]
    run.finished(run.start("verify", "--study", "tiny"))


@pytest.mark.slow
def test_killed_at_every_level_it_is_the_same_study(golden, tmp_path):
    """A rank, then the worker, then, by Ctrl-C and `hpo resume`, the driver."""
    run = run_in(tmp_path / "home")
    driver = run.run()
    wait_for_values(run, 1)
    me = psutil.Process(driver.pid)
    ranks = processes(me, "trainer.distributed.rank")
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    wait_for_values(run, 4)
    [worker] = processes(me, "hpo.workers.worker")
    ranks = processes(me, "trainer.distributed.rank")
    worker.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive, "ranks die with their worker"
    wait_until(lambda: len(run.query(select(attempts.c.fence))) > 2, driver)  # the trial is taken up once more
    driver.send_signal(signal.SIGINT)
    run.finished(driver, code=130)
    run.finished(run.start("resume", "--study", "tiny", "--workers", "1"), timeout=240)
    assert run.status()["digest"] == golden.status()["digest"]
    killed = [fields["why"] for (fields,) in run.query(select(events.c.fields)) if "SIGKILL" in str(fields)]
    assert sorted(why.partition(" ")[0] for why in killed) == ["pid", "rank"], "the worker, and before it the rank"
    outcomes = {outcome for (outcome,) in run.query(select(attempts.c.outcome))}
    # The Ctrl-C may fall before the new worker trains: then no attempt was there to be preempted.
    assert {"complete", "pruned", "lost"} <= outcomes <= {"complete", "pruned", "lost", "preempted"}
    run.finished(run.start("verify", "--study", "tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after_copy", "after_files", "before_rename", "before_commit"])
def test_a_rank_killed_in_a_save_of_parts_changes_nothing(tmp_path, point):
    """ZeRO-3, saved in the background, against the same that waits for its saves; and what the checkpoints are good
    for: `hpo verify` holds MLflow's models against them, and one opens."""
    sharded = ("-o", "train.parallel.shard=zero3")
    golden, run = (run_in(tmp_path / name) for name in ("golden", "home"))
    golden.extra += sharded
    golden.finished(golden.run(), timeout=400)
    (fired := tmp_path / "fired").mkdir()
    run.extra += (*sharded, "-o", "train.checkpoint.asynchronous=true")
    run.environ |= {"HPO_TESTING": "1", "HPO_FAILPOINTS_FIRED": str(fired)}
    run.environ |= {"HPO_FAILPOINTS": f"checkpoint.{point}=kill@3"}
    run.finished(run.run(), timeout=400)
    assert [path.name for path in fired.iterdir()] == [f"checkpoint.{point}"]
    assert run.status()["digest"] == golden.status()["digest"]
    run.finished(run.start("verify", "--study", "tiny"))
    [kept, *_] = sorted(run.home.glob("checkpoints/tiny/00000/step-*"))
    assert len(list(kept.glob("model-*-of-00002.safetensors"))) == 2
    [(config, config_hash)] = run.query(select(asks.c.config, asks.c.config_hash).where(asks.c.trial_id == 1))
    study = load(str(STUDY))
    weights = study.load_model(kept, study.rebuild(config, config_hash)).state_dict()
    assert {"0.weight", "3.bias"} <= set(weights)


@pytest.mark.usefixtures("ranks")
def test_parameters_reach_every_rank_to_the_last_bit(tmp_path, monkeypatch):
    """A float that float32 does not hold, a seed beyond int32."""
    lr, seed = 0.00055471194716, 2**40 + 1
    log = tmp_path / "log"
    monkeypatch.setenv("TINY_RANKS", str(log))
    pinned = {"train.optim.lr": lr, "train.seed": seed}
    ledger, state = drive(Home(tmp_path / "home"), bound={"trials": 1}, overrides=TWO | pinned, sampler="random")
    assert state == "complete"
    [(config,)] = found(ledger, asks.c.config)
    assert (config["train"]["optim"]["lr"], config["train"]["seed"]) == (lr, seed)
    lines = log.read_text().splitlines()
    assert set(lines) == {f"{rank} {lr!r} {seed}" for rank in range(2)}
    [(steps,)] = found(ledger, trials.c.step)
    assert len(lines) >= 2 * steps, "each of the two computes in every window"


@pytest.mark.slow
def test_a_paused_trial_of_ranks_is_the_one_that_never_paused(tmp_path):
    flags = {"bound": {"trials": 3}, "overrides": TWO, "sampler": "random"}
    promoted, state = drive(Home(tmp_path / "promoted"), strategy="asha-promote", **flags)
    straight, _ = drive(Home(tmp_path / "straight"), strategy="none", **flags)
    assert state == "complete"
    assert {ranks for (ranks,) in found(promoted, trials.c.ranks)} == {2}
    ends = found(promoted, attempts.c.trial_id, attempts.c.outcome, attempts.c.from_step)
    resumed = [trial for trial, outcome, step in ends if step > 0]
    assert resumed and "paused" in {outcome for _, outcome, _ in ends}
    columns = (reports.c.trial_id, reports.c.step, reports.c.key, reports.c.value)
    values = set(found(straight, *columns, where=reports.c.key == "val/loss"))
    seen = set(found(promoted, *columns, where=reports.c.key == "val/loss"))
    assert seen < values, "what was trained is the beginning of each trial, bit by bit"
    assert any(trial == resumed[0] and step > 4 for trial, step, _, _ in seen)
