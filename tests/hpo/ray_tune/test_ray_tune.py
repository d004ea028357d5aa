"""Ray Tune decides and the ledger records it: a Tuner of one's own, and `hpo run --executor ray-tune`."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kill import STUDY, Run, wait_until
from mirrored import ENVIRONMENT, Made
from sqlalchemy import select, update

import hpo
from hpo.clock import FakeClock
from hpo.driver import proposer
from hpo.driver.open import open_study
from hpo.driver.request import DriverOptions, request_of
from hpo.driver.resolve import declare
from hpo.driver.run import run
from hpo.errors import Busy, HpoError, UserError
from hpo.ledger import Ledger, claims, external, transactions, worker_rows
from hpo.ledger.database.tables import asks, attempts, decisions, events, reports, studies, trials
from hpo.ledger.leases import acquire
from hpo.ledger.process_id import Process
from hpo.ledger.views import driver as driver_queries
from hpo.ray_tune.driver import TuneDriver
from hpo.search.strategies.registry import make_strategy
from hpo.space.dimensions import Float, Int
from hpo.space.trial_state import OPEN_STATES
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.workers.executors.placement import Placement
from hpo.workers.executors.resources import NOTHING_SAID, Resources
from trainer.report import Outcome, Report

pytestmark = pytest.mark.whole

PINNED = {"train.optim.name": "adamw", "model.hidden_size": 8, "pause": 0.0}
FLAGS = tuple(word for path, value in PINNED.items() for word in ("-o", f"{path}={value}"))


def rows(home: Path, query) -> list:
    ledger = Ledger(Home(home).storage, create=False)
    with ledger.read() as connection:
        found = list(connection.execute(query).all())
    ledger.close()
    return found


def stays(scheduler: str, params: Mapping[str, float], first: int) -> bool:
    """Whether a trial that begins at epoch `first` may have the donor's parameters, which are `params`.

    PBT's factor of 1.2 is cut at a bound, where the donor may stand. PB2 copies them where the donor has reported but
    once, since its model is of differences between reports; and its optimum may be the very corner the donor stands in.
    """
    bounds = [hpo.load(str(STUDY)).space.dimensions[path] for path in params]
    at_bound = [
        value in map(pytest.approx, (one.low, one.high)) for value, one in zip(params.values(), bounds, strict=True)
    ]
    return any(at_bound) if scheduler == "pbt" else first == 2 or all(at_bound)


def check_lineage(home: Path, scheduler: str) -> int:
    """What went on from another's checkpoint begins at that one's step, with other parameters (`stays`), and what it
    took the place of says so unless it had come to its end by then; how many did."""
    t = trials.c
    found = {row.number: row for row in rows(home, select(trials, asks.c.params).join(asks, asks.c.trial_id == t.id))}
    children = [row for row in found.values() if row.parent is not None]
    stops = rows(
        home,
        select(t.number, decisions.c.reason, decisions.c.strategy)
        .join(decisions, decisions.c.trial_id == t.id)
        .where(decisions.c.verdict == "stop"),
    )
    assert {strategy.partition(":")[0] for _, _, strategy in stops} <= {"ray-tune"}
    why = {number: reason for number, reason, _ in stops if "goes on as trial" in reason}
    for child in children:
        parent = found[child.parent]
        assert child.generation == parent.generation + 1
        assert child.params.keys() == parent.params.keys()
        [fields] = rows(
            home, select(events.c.fields).where(events.c.trial_id == child.id, events.c.kind == "restarted")
        )
        assert fields[0]["parent"] == parent.number
        before = found[fields[0]["instead_of"]]
        said = why.get(before.number) or before.error or ""  # the latter where it had reported nothing yet
        if before.outcome != "complete":
            assert f"it goes on as trial {child.number}, from" in said
            why.pop(before.number, None)
        mine = select(reports.c.epoch).where(reports.c.epoch.is_not(None), reports.c.key == "val/loss")
        epochs = [epoch for (epoch,) in rows(home, mine.where(reports.c.trial_id == child.id).order_by(reports.c.step))]
        theirs = {epoch for (epoch,) in rows(home, mine.where(reports.c.trial_id == parent.id))}
        assert epochs and min(epochs) - 1 in theirs, "it goes on where the other one had a checkpoint"
        assert child.params != parent.params or stays(scheduler, child.params, min(epochs))
    assert not why, "each that was replaced has its child"
    return len(children)


@pytest.mark.timeout(900)
def test_a_population_in_ones_own_tuner_is_recorded_with_its_lineage(tmp_path, ray_cluster):
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    from hpo import ray_tune

    study = hpo.load(str(STUDY)).configure(PINNED | {"train.num_epochs": 3})
    trainable = ray_tune.as_trainable(study, tmp_path / "home")
    space = ray_tune.param_space(study)
    assert space.keys() == {"train.optim.lr", "model.dropout"}
    scheduler = PopulationBasedTraining(
        time_attr="epoch",
        perturbation_interval=1,
        quantile_fraction=0.5,
        synch=True,
        hyperparam_mutations={"train.optim.lr": space["train.optim.lr"]},
    )
    ray.init(address=ray_cluster, log_to_driver=False, logging_level="ERROR")
    try:
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="val/loss", mode="min", num_samples=2, scheduler=scheduler, reuse_actors=True
            ),
            run_config=tune.RunConfig(
                storage_path=str(tmp_path / "tune"), callbacks=[ray_tune.Recorder(trainable)], verbose=0
            ),
        )
        results = tuner.fit()
    finally:
        ray.shutdown()
    assert not results.errors
    assert all(Path(result.checkpoint.path, "checkpoint").is_dir() for result in results)
    assert check_lineage(tmp_path / "home", "pbt") == 2, (
        "one after each of the first two epochs; after the third none has left"
    )
    assert scheduler._num_perturbations >= 2
    ended = rows(tmp_path / "home", select(trials.c.state, trials.c.told))
    assert {state for state, _ in ended} == {"complete", "pruned"}
    assert sorted(told for _, told in ended) == list(range(len(ended)))
    at = Run(tmp_path / "home")
    at.finished(at.start("sync"))
    assert re.match("0 differences", at.finished(at.start("verify")))


@contextmanager
def driving_tune(home: Home, reference: str | None, **options: Any) -> Iterator[TuneDriver]:
    """A driver in this process, which holds the study's lease. `declared` goes to the request, the rest to the run."""
    ledger = Ledger(home.create().storage)
    declared = options.pop("declared", {})
    resolved = declare(request_of(home, reference, strategy="none", order="async", **declared), ledger, workers=1)
    resources, scheduler = options.pop("resources", NOTHING_SAID), options.pop("scheduler", "fifo")
    placement = Placement("ray-tune", options.pop("workers", 1), resources, scheduler=scheduler)
    options = DriverOptions(home, ledger.url, home.tracking_uri, placement=placement, **options)
    driver = TuneDriver(ledger, resolved, options, placement.make())
    driver.acquire()
    try:
        yield driver
    finally:
        driver.release()
        ledger.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheduler", ["bohb", pytest.param("hyperband", marks=pytest.mark.slow)])
def test_who_survives_its_bracket_trains_to_its_end(tmp_path, ray_cluster, scheduler):
    """Of ten epochs a bracket of Tune's ends at nine, 3^2. What the configuration refuses is not given to Tune."""
    text = STUDY.with_name("kept_study.py").read_text()
    checked = 'if self.x > 0.8:\n            raise ValueError("x is above 0.8")\n        return self'
    rule = f'    y: float = 0.5\n\n    @model_validator(mode="after")\n    def rule(self):\n        {checked}\n'
    text = text.replace("    y: float = 0.5\n", rule).replace("import BaseModel", "import model_validator, BaseModel")
    file = tmp_path / "kept.py"
    file.write_text(text.replace('"x": Float(0.0, 1.0)', '"x": Float(0.0, 1.0)').replace("EVERY = 3", "EVERY = 1"))
    declared = {"overrides": {"train.num_epochs": 10}}
    home = Home(tmp_path / "home")
    with pytest.raises(UserError, match=r"x is above 0\.8\. Narrow the space, or state how its fields are related"):
        declare(request_of(home, str(file)), None, workers=1)
    file.write_text(file.read_text().replace("if self.x > 0.8", "if self.x > 0.8 and self.x != 1.0"))
    with driving_tune(home, str(file), trials=8, scheduler=scheduler, declared=declared) as driver:
        assert driver.run() == "complete", driver.reason
    found = rows(tmp_path / "home", select(trials, asks.c.params).join(asks, asks.c.trial_id == trials.c.id))
    assert len(found) == 8
    for row in found:
        assert (row.outcome == "refused") == (row.params["x"] > 0.8)
    trained = {row.number: row for row in found if row.outcome != "refused"}
    assert len(trained) < 8, "some were refused"
    complete = [row for row in trained.values() if row.state == "complete"]
    assert complete and all(row.epoch == 10 for row in complete)
    pruned = [row.epoch for row in trained.values() if row.state == "pruned"]
    assert all(epoch < 10 for epoch in pruned) and len(complete) + len(pruned) == len(trained)


GPUS = '__import__("ray").get_runtime_context().get_assigned_resources().get("GPU", 0)'
CARRIED = 'float("/runtime_resources/" in __file__)'
# Says when hpo.workers.attempt was imported by the process that reads the study.
NOTES_WHEN_IT_COMES = """
import sys, time
WHEN = [0.0] if "hpo.workers.attempt" in sys.modules else []
class Notes:
    def find_spec(self, name, *_):
        if name == "hpo.workers.attempt":
            WHEN.append(time.time())
sys.meta_path.insert(0, Notes())
"""


@pytest.mark.timeout(600)
def test_a_study_outlives_a_killed_process_and_an_interruption(tmp_path, ray_cluster, monkeypatch):
    """Trials train one at a time. Trial 0 kills its process, which this driver allows no trial to do twice; it is
    interrupted while the trial that replaces it trains, and another driver goes on.

    Every process has the code that Ray has carried and its share of the cluster's GPUs, though the driver's host has
    none; and it has imported what trains before it claims a trial. On a busy host that import outlasts the lease, which
    nothing renews yet, so the trial would be lost again and again.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(transactions, "MAX_LOSSES", 0)
    study_file = tmp_path / "mine.py"
    kill = "(self.config.train.optim.lr == 0.0123 and os.kill(os.getpid(), 9))"
    measured = f'return {{"val/imported": WHEN[0], "val/gpus": {GPUS}, "val/carried": {CARRIED}, "val/loss"'
    text = STUDY.read_text().replace('os.environ.get("TINY_FAIL")', kill).replace('return {"val/loss"', measured)
    study_file.write_text(NOTES_WHEN_IT_COMES + text)
    home = Home(tmp_path / "home")
    options = {"trials": 2, "resources": Resources(cpus=2)}
    overrides = PINNED | {"train.num_epochs": 3, "pause": 0.05}
    declared = {"overrides": overrides, "enqueue": [{"train.optim.lr": 0.0123}]}
    progress = select(trials.c.id).join(reports).where(reports.c.epoch == 1, trials.c.number == 2).limit(1)
    with driving_tune(home, str(study_file), **options, declared=declared) as driver:

        def interrupt() -> None:
            if driver._ledger.look(lambda connection: connection.execute(progress).first()):
                driver.request_stop()

        assert driver.run(interrupt) == "interrupted"
    t = trials.c
    by_number = select(t.number, t.state, t.epoch, t.fence).order_by(t.number)
    (_, lost, *_), trained, (number, left, *_) = rows(home.root, by_number)
    assert (lost, trained, number) == ("failed", (1, "complete", 3, 1), 2)
    assert left in OPEN_STATES
    [(error,)] = rows(home.root, select(t.error).where(t.number == 0))
    assert error.startswith("its worker was lost 1 times; last: ")
    with driving_tune(home, None, **options, declared={"name": "tiny"}) as driver:
        assert driver.run() == "complete"
    _, as_before, (number, *ended, fence) = rows(home.root, by_number)
    assert as_before == trained, "what had ended is not trained again"
    assert (number, ended) == (2, ["complete", 3]) and fence > 1
    outcomes = select(attempts.c.outcome).join(trials).where(t.number == 0)
    assert rows(home.root, outcomes) == [("lost",)]

    value = select(reports.c.value).distinct()
    for key in ("val/gpus", "val/carried"):
        assert rows(home.root, value.where(reports.c.key == key)) == [(1.0,)], key
    same = (attempts.c.trial_id == reports.c.trial_id) & (attempts.c.fence == reports.c.fence)
    imported = select(reports.c.value, attempts.c.started_at).join(attempts, same)
    moments = rows(home.root, imported.where(reports.c.key == "val/imported"))
    assert moments and all(imported < claimed for imported, claimed in moments)
    with closing(Ledger(home.storage)) as ledger:
        Results(ledger, "tiny", home).write()  # as the command does
    at = Run(home.root)
    at.finished(at.start("sync"))
    assert re.match("0 differences", at.finished(at.start("verify")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs where torch finds no GPU, whose share it would take")
def test_a_trial_of_tune_keeps_to_its_share_of_a_gpu(tmp_path, ray_cluster):
    """torch is asked to keep to it: where there is no GPU, as here, it refuses."""
    import ray
    from ray import tune

    from hpo import ray_tune

    study = hpo.load(str(STUDY.with_name("curves_study.py")))
    trainable = ray_tune.as_trainable(study, tmp_path / "home")
    ray.init(address=ray_cluster, log_to_driver=False, logging_level="ERROR")
    try:
        [result] = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1, "gpu": 0.5}),
            param_space=ray_tune.param_space(study),
            tune_config=tune.TuneConfig(metric="val/loss", mode="min", num_samples=1),
            run_config=tune.RunConfig(
                storage_path=str(tmp_path / "tune"), callbacks=[ray_tune.Recorder(trainable)], verbose=0
            ),
        ).fit()
    finally:
        ray.shutdown()
    assert re.search("0.5: torch .* finds no GPU", str(result.error)), result.error
    assert rows(tmp_path / "home", select(trials.c.number)) == [], "before anything of the trial is begun"


@pytest.mark.timeout(600)
def test_failures_end_a_study_and_not_the_command(tmp_path, ray_cluster):
    """Trials of sgd fail before their first result of Tune's, the others in the second epoch."""
    broken = tmp_path / "broken.py"
    count = 'self.__dict__.setdefault("n", []).append(0) or len(self.n) > 15 * (self.config.train.optim.name != "sgd")'
    broken.write_text(STUDY.read_text().replace('os.environ.get("TINY_FAIL")', count))
    at = Run(tmp_path / "home")
    told = ("run", "--study", str(broken), "--trials", "9", "--executor", "ray-tune", "--workers", "1")
    said = at.finished(at.start(*told, "--scheduler", "fifo", "--seed", "1", "-o", "pause=0.0"), code=5, timeout=500)
    assert "trials in a row failed in the same way" in said and "ValueError: the task is broken" in said
    assert not re.search(r"TuneError|RuntimeError|tune_controller", said), said
    status = at.status()
    assert status["state"] == "stopped"
    count = select(trials.c.number, trials.c.outcome, trials.c.step > 0, trials.c.fence)
    ended = rows(at.home, count)
    assert 3 <= len(ended) < 9, "no more is proposed"
    assert {outcome for _, outcome, _, _ in ended} == {"user_error"}
    assert {reported for *_, reported, _ in ended} == {True, False}, "both kinds"
    assert {fence for *_, fence in ended} == {1}, "Tune tries none again"
    assert re.match("0 differences", at.finished(at.start("verify")))


@pytest.mark.slow  # seven processes are started; with fewer losses it is part of the study that is interrupted
@pytest.mark.timeout(600)
def test_a_killing_configuration_fails_its_trial_under_every_executor(tmp_path, ray_cluster):
    """As test_lost_workers has it under `local`; the other trial is not lost."""
    mine, first = tmp_path / "mine.py", tmp_path / "first.yaml"
    kill = "(self.config.train.optim.lr == 0.0123 and os.kill(os.getpid(), 9))"
    mine.write_text(STUDY.read_text().replace('os.environ.get("TINY_FAIL")', kill))
    first.write_text("train.optim.lr: 0.0123\n")
    at = Run(tmp_path / "home")
    told = ("run", "--study", str(mine), "--trials", "1", "--executor", "ray-tune", "--scheduler", "fifo", *FLAGS)
    at.finished(at.start(*told, "--enqueue", str(first), "-o", "train.num_epochs=1"), timeout=500)
    status = at.status()
    assert status["state"] == "complete"
    assert {state: count for state, count in status["trials"].items() if count} == {"complete": 1, "failed": 1}
    [(error,)] = rows(at.home, select(trials.c.error).where(trials.c.number == 0))
    assert error.startswith("its worker was lost 6 times; last: ")
    ends = select(attempts.c.outcome).join(trials, trials.c.id == attempts.c.trial_id).where(trials.c.number == 0)
    assert rows(at.home, ends) == [("lost",)] * 6
    assert re.match("0 differences", at.finished(at.start("verify")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_killed_again_and_again_gets_on_and_is_not_given_up(tmp_path, ray_cluster):
    mine = tmp_path / "mine.py"
    kill = """(
                self.__dict__.setdefault("n", []).append(0) or len(self.n) > 15 and os.kill(os.getpid(), 9)
            )"""
    mine.write_text(STUDY.read_text().replace('os.environ.get("TINY_FAIL")', kill))
    at = Run(tmp_path / "home")
    told = ("run", "--study", str(mine), "--trials", "1", "--executor", "ray-tune", "--scheduler", "fifo", *FLAGS)
    at.finished(at.start(*told, "-o", "train.num_epochs=10"), timeout=800)
    [ended] = rows(at.home, select(trials.c.state, trials.c.epoch))
    assert ended == ("complete", 10)
    outcomes = [outcome for (outcome,) in rows(at.home, select(attempts.c.outcome).order_by(attempts.c.fence))]
    assert len(outcomes) > 7 and outcomes == ["lost"] * (len(outcomes) - 1) + ["complete"]
    assert re.match("0 differences", at.finished(at.start("verify")))


@pytest.mark.slow  # four processes are started; the Recorder is asked below
@pytest.mark.timeout(300)
def test_processes_that_never_come_to_train_end_the_run_in_a_sentence(tmp_path, ray_cluster):
    """Of a home whose marker is gone, as of a directory that is not mounted on the nodes."""
    home = Home(tmp_path / "home")
    with driving_tune(home, str(STUDY.with_name("curves_study.py")), trials=1) as driver:
        shutil.rmtree(home.root / "checkpoints")
        with pytest.raises(HpoError, match=r"trials cannot go on under Ray Tune \(.*\S\)\.$"):
            driver.run()
    assert rows(home.root, select(attempts.c.outcome)) == []


def taken_over(ledger: Ledger, heartbeat: Any) -> None:
    """As by a driver on another host, of one that was silent for its lease."""
    heartbeat.close()
    acquire(ledger, "driver:1", "s", Process("far", 1, "then"), FakeClock(), 30)


def test_what_tune_trains_has_not_ended(tmp_path):
    """So a Ctrl-C is told that it stops, and not that nothing is left."""
    with driving_tune(Home(tmp_path / "home"), str(STUDY), trials=2) as driver:
        for key in ("first", "second"):
            assert not driver.all_ended()
            driver._proposed(key)
        assert not driver.all_ended(), "all were asked for, and wait"
        driver._ledger.transact(lambda c: c.execute(update(trials).values(state="complete")))
        assert driver.all_ended()


def test_a_driver_that_has_lost_the_study_writes_nothing_more(tmp_path):
    with driving_tune(Home(tmp_path / "home"), str(STUDY), trials=4) as driver:
        ledger, me = driver._ledger, Process.current()
        driver._proposed("first")
        ledger.transact(lambda c: worker_rows.register(c, me, "ray-tune"))
        before = rows(tmp_path / "home", select(trials, asks.c.trial_attrs).join(asks))
        taken_over(ledger, driver.study._heartbeat)
        for write in (
            lambda: driver._proposed("second"),
            lambda: driver._renamed(0, "other"),
            lambda: driver._note_ends(),
        ):
            with pytest.raises(Busy, match="driver:1 has been taken over by another process"):
                write()
        assert rows(tmp_path / "home", select(trials, asks.c.trial_attrs).join(asks)) == before


def test_a_recorder_that_has_lost_the_study_writes_nothing_more(tmp_path):
    from hpo import ray_tune

    trainable = ray_tune.as_trainable(hpo.load(str(STUDY)), tmp_path / "home")
    recorder = ray_tune.Recorder(trainable)
    recorder.setup()
    [(environment,)] = rows(tmp_path / "home", select(studies.c.environment))
    assert (environment["executor"], environment["scheduler"]) == ("ray-tune", "fifo"), "no worker is to join it"
    recorder._lease.write(lambda c: external.insert(c, 1, one_to_try, "tunes"))
    before = rows(tmp_path / "home", select(trials))
    recorder._end()
    acquire(recorder._ledger, "driver:1", "s", Process("far", 1, "then"), FakeClock(), 30)
    trial = SimpleNamespace(trial_id="tunes", status="PAUSED")
    for write in (recorder.on_trial_complete, recorder.on_trial_error):
        with pytest.raises(Busy, match="driver:1 has been taken over by another process"):
            write(1, [trial], trial)
    assert rows(tmp_path / "home", select(trials)) == before
    recorder._ledger.close()


def test_processes_that_fail_before_they_train_end_tune_at_the_fourth(tmp_path):
    """One that dies over its trial counts among that trial's losses instead, and a result begins the count anew."""
    from hpo import ray_tune

    recorder = ray_tune.Recorder(ray_tune.as_trainable(hpo.load(str(STUDY)), tmp_path / "home"))
    recorder.setup()
    recorder._lease.write(lambda c: external.insert(c, 1, one_to_try, "tunes"))
    worker = Process.current()
    recorder._ledger.transact(lambda c: worker_rows.register(c, worker, "ray-tune"))
    trial = SimpleNamespace(trial_id="tunes", status="PENDING", get_error=lambda: "no home\n\nUserError: no marker\n")
    try:
        for token in range(5):  # each dies over the trial
            claim = recorder._ledger.transact(lambda c, token=token: claims.take(c, worker.id, f"token{token}", 1))
            recorder.on_trial_recover(1, [trial], trial)
            recorder._ledger.transact(lambda c, fence=claim.fence: transactions.lose(c, 1, fence, "gone"))
            recorder.on_step_begin(1, [trial])
        for _ in range(3):
            recorder.on_trial_recover(1, [trial], trial)
            recorder.on_step_begin(1, [trial])
        recorder.on_trial_result(1, [trial], trial, {})
        for _ in range(3):
            recorder.on_trial_recover(1, [trial], trial)
            recorder.on_step_begin(1, [trial])
        recorder.on_trial_recover(1, [trial], trial)
        with pytest.raises(HpoError, match=r"trials cannot go on under Ray Tune \(UserError: no marker\)\.$"):
            recorder.on_step_begin(1, [trial])
    finally:
        recorder._end()
        recorder._ledger.close()


def one_to_try(number: int) -> transactions.Ask:
    return transactions.Ask(number, 0, 1, 0, {}, {}, {}, "h" * 64)


@pytest.mark.slow  # by the command and a signal; the driver is interrupted above
@pytest.mark.timeout(600)
def test_a_study_that_was_interrupted_is_resumed_to_its_end(tmp_path, ray_cluster):
    at = Run(tmp_path / "home")
    told = ("run", "--study", str(STUDY), "--trials", "3", "--executor", "ray-tune", "--scheduler", "fifo")
    process = at.start(*told, "-o", "train.optim.name=adamw", "-o", "model.hidden_size=8", "-o", "train.num_epochs=3")
    begun = select(reports.c.epoch).where(reports.c.epoch.is_not(None)).limit(1)
    wait_until(lambda: at.query(begun), process)
    process.send_signal(signal.SIGINT)
    at.finished(process, code=130, timeout=240)
    left = {number for (number,) in at.query(select(trials.c.number).where(trials.c.state.in_(OPEN_STATES)))}
    assert left
    at.finished(at.start("resume", "--study", "tiny"), timeout=500)
    assert at.status()["state"] == "complete"
    ended = at.query(select(trials.c.number, trials.c.state, trials.c.epoch, trials.c.fence))
    assert [(number, state, epoch) for number, state, epoch, _ in ended] == [(n, "complete", 3) for n in range(3)]
    assert {number for number, *_, fence in ended if fence > 1} <= left, "what had ended is not trained again"
    assert re.match("0 differences", at.finished(at.start("verify")))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_of")  # counts it among the tests of Ray, though it starts its own
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheduler", ["asha", "bohb", "hyperband", "median", "pbt", "pb2"])
def test_every_scheduler_drives_a_study_to_its_end(tmp_path, scheduler):
    at = Run(tmp_path / "home")
    told = ("run", "--study", str(STUDY), "--trials", "4", "--executor", "ray-tune", "--scheduler", scheduler)
    at.finished(at.start(*told, *FLAGS, "-o", "train.num_epochs=6"), timeout=1500)
    status = at.status()
    assert status["state"] == "complete"
    assert re.match("0 differences", at.finished(at.start("verify")))
    children = check_lineage(at.home, scheduler)
    print(f"{scheduler}: {children} perturbations, {status['trials']}")
    if scheduler in ("pbt", "pb2"):
        assert children > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "asha"}, "--strategy with --executor ray-tune: there Ray Tune decides"),
        ({"order": "ordered"}, "--order ordered with --executor ray-tune"),
        ({"epochs": 5}, "--epochs with --executor ray-tune"),
        ({"scheduler": "ashah"}, "--scheduler 'ashah' is not known.*did you mean 'asha'"),
        ({"executor": "local", "scheduler": "pbt"}, "--scheduler pbt with --executor local: it belongs to ray-tune"),
    ],
)
def test_what_tune_has_taken_over_is_refused(tmp_path, given, said):
    request = request_of(Home(tmp_path / "home"), **{"reference": "mlp", "executor": "ray-tune", "trials": 1} | given)
    with pytest.raises(UserError, match=said):
        run(request, lambda *_: lambda _: None)
    assert not (tmp_path / "home").exists()


def test_a_resume_is_refused_what_tune_has_taken_over(tmp_path):
    home = Home(tmp_path / "home").create()
    ledger = Ledger(home.storage)
    resolved = declare(request_of(home, "mlp", strategy="none", order="async"), ledger, workers=1)
    placement = Placement("ray-tune", 1, scheduler="asha")
    open_study(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=2, placement=placement))
    ledger.close()
    for given in ({"epochs": 5}, {"seconds": 5.0}, {"strategy": "asha"}):
        with pytest.raises(UserError, match="with --executor ray-tune: there Ray Tune decides"):
            run(request_of(home, name="mlp", **given), lambda *_: lambda _: None)


@pytest.mark.parametrize(("bound", "said"), [({"epochs": 40}, "--epochs 40"), ({"seconds": 5400.0}, "--time 1h30m")])
def test_a_bound_that_tune_would_not_keep_to_is_refused_on_resume(tmp_path, bound, said):
    home = Home(tmp_path / "home").create()
    ledger = Ledger(home.storage)
    resolved = declare(request_of(home, "mlp", strategy="none", order="async"), ledger, workers=1)
    open_study(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, **bound))
    ledger.close()
    with pytest.raises(UserError, match=f"study 'mlp' was begun with {said}, which Ray Tune does not keep to: go on"):
        run(request_of(home, name="mlp", executor="ray-tune", trials=5), lambda *_: lambda _: None)


def test_the_sampler_is_made_once_and_proposes_what_one_made_anew_would(tmp_path, monkeypatch):
    """Trials end out of order, and a child of one takes the number that the sampler has counted on."""
    me, made, make = Process.current(), [], proposer.make_sampler
    monkeypatch.setattr(proposer, "make_sampler", lambda *given: made.append(given) or make(*given))

    with driving_tune(Home(tmp_path / "home"), str(STUDY), trials=40, scheduler="asha") as driver:
        ledger = driver._ledger
        ledger.transact(lambda c: worker_rows.register(c, me, "ray-tune"))

        def row_of(number: int):
            return ledger.look(lambda c: driver_queries.rows(c, 1, [number]))[0]

        def end(number: int) -> None:
            taken = ledger.transact(lambda c: claims.take(c, me.id, f"token{number}", row_of(number).id))
            loss = (number * 7 % 11) / 11
            told = transactions.TrialReport(taken, Report(1, {"val/loss": loss}, epoch=1))
            ledger.transact(lambda c: transactions.commit(c, [told]))
            ledger.transact(lambda c: transactions.finish(c, taken, Outcome("complete", 1, 1), [loss]))

        def child_first(ask, number: int, told: int):
            found, parent = ask(number, told=told), row_of(3)
            child = transactions.Ask(number, 0, 1, told, parent.params, parent.coordinates, {}, "h" * 64)
            ledger.transact(lambda c: external.insert(c, 1, lambda _: child, "child"))
            return found

        for place in range(16):
            if place == 12:
                monkeypatch.setattr(
                    driver.study.frontier.proposer, "ask", partial(child_first, driver.study.frontier.proposer.ask)
                )
            proposed = driver._proposed(f"key{place}")
            rows = {row.number: row for row in ledger.look(lambda c: driver_queries.all_rows(c, 1))}
            number = max(rows)
            assert number == place + (place >= 12) and rows.pop(number).params == proposed
            told = [n for _, n in sorted((row.told, n) for n, row in rows.items() if row.told is not None)]
            anew = proposer.LedgerProposer(ledger, driver._resolved, driver.study.curves, rows, told, 0).ask(
                number, told=len(told)
            )
            assert anew.params == proposed
            if place % 3 == 2:
                end(place), end(place - 2)
        assert len(told) == 10
        assert len(made) == 16 + 2, "once, and again once another had the number that it believed its own"


def test_several_objectives_are_refused(tmp_path):
    two = tmp_path / "two.py"
    one = 'Objective("val/loss", "minimize")'
    two.write_text(STUDY.read_text().replace(f"[{one}]", f'[{one}, Objective("train/loss", "minimize")]'))
    request = request_of(Home(tmp_path / "home"), str(two), executor="ray-tune", sampler="random", trials=1)
    with pytest.raises(UserError, match="judge by one objective, and the study has val/loss, train/loss"):
        run(request, lambda *_: lambda _: None)


def test_ones_own_tuner_refuses_a_study_in_a_bucket(tmp_path):
    from hpo import ray_tune

    made = Made(Home(tmp_path / "home"))
    with made.ledger.write() as connection:
        connection.execute(update(studies).values(environment=ENVIRONMENT | {"checkpoints": "s3://theirs/of/mine"}))
    made.ledger.close()
    before = (tmp_path / "home" / "ledger.db").read_bytes()
    with pytest.raises(
        UserError, match=r"study 's' has its checkpoints in s3://theirs/of/mine, and Tune keeps its own"
    ):
        ray_tune.as_trainable(hpo.load(str(STUDY)), tmp_path / "new", name="s", storage=made.ledger.url)
    assert not (tmp_path / "new").exists() and (tmp_path / "home" / "ledger.db").read_bytes() == before


@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_a_population_of_folds_is_refused(name):
    from hpo.ray_tune.driver import make_scheduler

    with pytest.raises(UserError, match=f"train.folds=2: under --scheduler {name} a trial goes on from another's"):
        make_scheduler(name, hpo.load("mlp").configure({"train.folds": 2}))


@pytest.mark.parametrize(("epochs", "first"), [(12, 4), (9, 3), (3, 3)])
def test_asha_of_tune_has_the_same_first_rung(epochs, first):
    from hpo.ray_tune.driver import make_scheduler

    scheduler = make_scheduler("asha", hpo.load("mlp").configure({"train.num_epochs": epochs}))
    rungs = [milestone for bracket in scheduler._brackets for milestone, _ in bracket._rungs]
    assert min(rungs) == first


FLOATS = {
    "train.optim.lr": Float(1e-3, 1e-1, log=True),
    "train.optim.weight_decay": Float(0.0, 0.1),
    "train.init.std": Float(0.01, 0.1),
    "train.average.decay": Float(0.9, 0.999),
    "train.batch_size": Int(16, 64),
}


@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_tunes_populations_change_what_the_own_ones_do(name):
    """What training has behind it, or a checkpoint is bound to, is the donor's."""
    from ray.tune.schedulers import PopulationBasedTraining
    from ray.tune.schedulers.pb2 import PB2

    from hpo.ray_tune.driver import make_scheduler

    study = replace(hpo.load("mlp"), space=FLOATS)
    scheduler = make_scheduler(name, study)
    assert type(scheduler) is {"pbt": PopulationBasedTraining, "pb2": PB2}[name]
    changed = scheduler._hyperparam_mutations if name == "pbt" else scheduler._hyperparam_bounds
    assert sorted(changed) == ["train.optim.lr", "train.optim.weight_decay"]
    assert tuple(sorted(changed)) == make_strategy(name).changeable(study.space)
    settled = {path: one for path, one in FLOATS.items() if path not in changed}
    with pytest.raises(UserError, match=rf"--scheduler {name} perturbs every Float that may change .*train\.init\.std"):
        make_scheduler(name, replace(study, space=settled))


def test_whole_numbers_are_drawn_as_the_space_has_them():
    from ray.tune.search import sample

    from hpo.ray_tune.space import _domain

    drawn = {one: sorted(_domain(one).sample(size=400)) for one in (Int(1, 1000, log=True), Int(0, 6, step=2))}
    assert all(set(values) <= set(one.allowed()) for one, values in drawn.items())
    log, steps = drawn.values()
    assert sum(value < 32 for value in log) > 120, "about half of them"
    assert set(steps) == {0, 2, 4, 6}
    assert isinstance(_domain(Int(0, 6)), sample.Integer) and set(_domain(Int(5, 6)).sample(size=99)) == {5, 6}
    assert set(_domain(Int(1, 5, step=2)).sample(size=99)) == {1, 3, 5}


def test_what_a_scheduler_asks_for_is_brought_to_what_the_space_has():
    from hpo.ray_tune.space import params_of

    study = hpo.load("mlp")
    asked = {"train.optim.name": "adamw", "train.optim.lr": 0.3, "train.optim.momentum": 0.5, "train.batch_size": 100}
    _, params = params_of(study, {**asked, "model.hidden_size": 17.9, "hpo/key": "x"})
    assert params == {
        "train.optim.name": "adamw",
        "train.optim.lr": 0.1,
        "train.batch_size": 128,
        "model.hidden_size": 16,
        "model.num_layers": 2,  # not asked for: the middle
        "model.dropout": 0.25,
    }
