"""What every executor must do: the same study wherever it is trained, to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from driven import driven, turn
from places import HARNESS
from sqlalchemy import select

from hpo.driver.loop import Driver
from hpo.driver.request import DriverOptions, request_of
from hpo.driver.resolve import declare
from hpo.errors import Busy, HpoError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.ledger.database.tables import attempts, reports, workers
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.workers.executors.base import Executor
from hpo.workers.executors.inline import Inline
from hpo.workers.executors.local import Local
from hpo.workers.executors.ray import Ray
from hpo.workers.executors.resources import Resources
from hpo.workers.worker import Worker

STUDY = str(HARNESS / "curves_study.py")
EXECUTORS = {"inline": Inline, "local-1": lambda: Local(1), "local-2": lambda: Local(2), "local-4": lambda: Local(4)}
NO_GPUS = Resources(gpus=0.0)  # of those that the cluster claims to have: inline there are none
EXECUTORS |= {"ray-1": lambda: Ray(1, NO_GPUS), "ray-2": lambda: Ray(2, NO_GPUS)}
TINY = str(Path(STUDY).with_name("tiny_study.py"))
SAMPLERS = ("random", "grid", "qmc", "tpe", "gp", "cmaes", "nsga2", "nsga3", "auto", "bohb")
STRATEGIES = ("none", "median", "percentile", "patient", "threshold", "wilcoxon", "halving", "asha", "hyperband")
RARELY = ("none", "patient", "threshold")  # these stop no trial of a study whose curves all fall
TRIALS = 24
LANES: dict[str, Any] = {
    "reference": str(Path(STUDY).with_name("lanes_study.py")),
    "window": 8,
    "overrides": {"train.lanes": 4},
}
LANES_TRIALS = 8


def drive(
    home: Home, executor: Executor, trials: int = TRIALS, storage: str = "", **flags
) -> tuple[str, queries.Status, str]:
    """Run a study without its mirror: (digest, status, the state the driver left it in)."""
    with closing(Ledger(storage or home.create().storage)) as ledger:
        request = request_of(home, **{"reference": STUDY, "window": 4} | flags)
        name, state = driven(ledger, request, executor, trials=trials, lease_timeout=20)
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            return queries.digest(connection, row), queries.status(connection, name), state


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Callable[[str, str], tuple[str, queries.Status]]:
    """Gives the digest and the status of the study under a sampler and a strategy, driven inline once a session."""

    @functools.cache
    def run(sampler: str, strategy: str) -> tuple[str, queries.Status]:
        home = Home(tmp_path_factory.mktemp("golden") / "home")
        digest, status, state = drive(home, Inline(), sampler=sampler, strategy=strategy)
        assert state == "complete"
        return digest, status

    return run


def check(tmp_path: Path, golden: Callable, executor: str, sampler: str, strategy: str) -> None:
    flags = {"sampler": sampler, "strategy": strategy}
    expected, status = golden(sampler, strategy)
    digest, same, state = drive(Home(tmp_path / "other"), EXECUTORS[executor](), **flags)
    assert (state, sum(same.trials.values())) == ("complete", TRIALS)
    apart = {"attempts": 0, "seconds_used": 0.0}
    assert dataclasses.replace(same, **apart) == dataclasses.replace(status, **apart)
    assert digest == expected
    if strategy not in RARELY:
        assert status.trials["pruned"] > 0, "a strategy that never stops shows nothing"


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("executor", "sampler", "strategy"),
    [
        ("local-2", "tpe", "asha"),
        ("local-1", "qmc", "median"),
        pytest.param("local-4", "auto", "asha", marks=pytest.mark.slow),
    ],
)
def test_a_study_is_the_same_on_every_executor(tmp_path, golden, executor, sampler, strategy):
    """Ray has the whole of this in the full sweep, and here a study that loses an actor."""
    check(tmp_path, golden, executor, sampler, strategy)


EVERY = {(sampler, strategy) for sampler in SAMPLERS[:4] for strategy in ("none", "median", "asha")}
EVERY |= {(sampler, "asha") for sampler in SAMPLERS} | {("tpe", strategy) for strategy in STRATEGIES}


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "strategy"), sorted(EVERY))
@pytest.mark.parametrize("executor", ["local-1", "local-2", "local-4", "ray-1", "ray-2"])
def test_every_sampler_and_strategy_is_the_same_on_every_executor(
    tmp_path, golden, ray_cluster, executor, sampler, strategy
):
    check(tmp_path, golden, executor, sampler, strategy)


@pytest.fixture(scope="session")
def fused(tmp_path_factory) -> tuple[str, queries.Status]:
    """A study whose trials train as four lanes of one model, driven inline."""
    digest, status, state = drive(Home(tmp_path_factory.mktemp("fused") / "home"), Inline(), LANES_TRIALS, **LANES)
    assert state == "complete" and status.trials["pruned"] > 0
    return digest, status


def check_lanes(tmp_path: Path, fused: tuple[str, queries.Status], executor: str) -> None:
    digest, status, state = drive(Home(tmp_path / "home"), EXECUTORS[executor](), LANES_TRIALS, **LANES)
    assert (state, digest, status.trials) == ("complete", fused[0], fused[1].trials)


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("executor", [pytest.param("local-1", marks=pytest.mark.slow), "local-2"])
def test_a_study_of_lanes_is_the_same_on_every_executor(tmp_path, fused, executor):
    check_lanes(tmp_path, fused, executor)


@pytest.mark.slow  # Ray starts the worker processes that the local executor starts
def test_a_study_of_lanes_is_the_same_on_ray(tmp_path, ray_cluster, fused):
    check_lanes(tmp_path, fused, "ray-2")


# A sampler that is rebuilt at any ask is tested in test_samplers: here are those that learn in different ways.
@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(sampler, marks=[] if sampler in ("tpe", "cmaes", "nsga2") else pytest.mark.slow)
        for sampler in SAMPLERS
    ],
)
def test_a_study_run_in_parts_is_the_study_run_at_once(tmp_path, golden, sampler):
    whole, _ = golden(sampler, "asha")
    for trials in (1, 7, 23, TRIALS):
        part, _, state = drive(Home(tmp_path / "parts"), Inline(), trials, sampler=sampler, strategy="asha")
        assert state == "complete"
    assert part == whole


@pytest.mark.parametrize(("workers", "window"), [(1, 4), (2, 4), (3, 6), (8, 16)])
def test_the_window_follows_the_workers_from_two_on(tmp_path, workers, window):
    spec = declare(request_of(Home(tmp_path), reference="mlp"), None, workers=workers).spec
    assert (spec.order, spec.window) == ("ordered", window)


@pytest.mark.parametrize("other", [{"sampler": "random"}, {"strategy": "none"}, {"window": 5}, {"seed": 1}])
def test_what_decides_a_study_changes_its_digest(tmp_path, golden, other):
    flags = {"sampler": "tpe", "strategy": "asha"}
    one, _ = golden(**flags)
    two, _, _ = drive(Home(tmp_path / "two"), Inline(), **flags | other)
    assert one != two


@pytest.mark.usefixtures("process")
def test_asynchronous_order_ends_complete_with_every_trial_told_once(tmp_path):
    home = Home(tmp_path / "home")
    _, status, state = drive(home, Local(2), sampler="tpe", strategy="asha", order="async")
    assert (state, sum(status.trials.values())) == ("complete", TRIALS)
    with closing(Ledger(home.storage)) as ledger:
        told = ledger.look(lambda connection: connection.execute(select(tables.trials.c.told)).scalars().all())
    assert Counter(told) == Counter(range(TRIALS)), "each has a place in the order of tells, none is left out"


def test_a_study_on_postgresql_has_the_digest_of_one_on_sqlite(tmp_path, golden, postgres_database):
    flags = {"sampler": "tpe", "strategy": "asha"}
    digest, _, _ = drive(Home(tmp_path / "postgres").create(), Local(2), storage=postgres_database(), **flags)
    assert digest == golden(**flags)[0]


def refused_worker(tmp_path: Path, study: str, where: str, sentence: str) -> dict[str, int]:
    """A worker that joins a new study with its home at `where` ends with this sentence; returns the trials by state."""
    home = Home(tmp_path / "home").create()
    ledger = Ledger(home.storage)
    resolved = declare(request_of(home, reference=study), ledger, workers=1)
    driver = Driver(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=1), Inline())
    driver.acquire()
    turn(driver)
    worker = Worker(ledger, Home(tmp_path / where), "joined")
    with pytest.raises(UserError, match=sentence):
        worker.run_one([1])
    worker.close()
    with ledger.read() as connection:
        trials = queries.status(connection, resolved.spec.name).trials
    driver.release()
    ledger.close()
    return {state: count for state, count in trials.items() if count}


def test_a_worker_that_sees_no_checkpoints_is_refused_and_the_trial_waits(tmp_path):
    sentence = "share that directory and name it with --home"
    assert refused_worker(tmp_path, STUDY, "elsewhere", sentence) == {"waiting": 1}


def test_a_worker_without_torch_leaves_a_study_that_needs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("hpo.declaration.preflight.find_spec", lambda name: None)
    sentence = r"study 'mlp' trains with PyTorch, .*'hpo\[train\]'"
    assert refused_worker(tmp_path, "mlp", "home", sentence) == {"waiting": 1}


@pytest.mark.usefixtures("process")
def test_workers_that_cannot_start_end_the_run_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("hpo.workers.executors.local.spawn", _spawn_broken)
    with pytest.raises(
        HpoError, match=r"workers cannot go on \(exit code 1; .*No module named hpo_nowhere.*curves\..*worker-0.log"
    ):
        drive(Home(tmp_path / "home"), Local(1))


def _spawn_broken(module, arguments, log, **environ):
    from hpo.child_process import spawn

    return spawn("hpo_nowhere", arguments, log, **environ)


def test_a_second_driver_changes_nothing_of_a_study_that_is_driven(tmp_path):
    home = Home(tmp_path / "home").create()
    ledger = Ledger(home.storage)
    resolved = declare(request_of(home, reference=STUDY), ledger, workers=1)
    first, second = (
        Driver(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=n), Inline())
        for n in (2, 99)
    )
    first.acquire()
    with pytest.raises(Busy, match=r"already has a driver: host .*, pid \d+, since 20"):
        second.acquire()
    with ledger.read() as connection:
        assert queries.status(connection, "curves").requested == 2
    assert first.run() == "complete"
    first.release()
    ledger.close()


class Losing(Ray):
    """Loses an actor, as its host might: killed once its worker has trained for a while."""

    killed = 0

    def step(self) -> bool:
        for worker in self._workers:
            if not self.killed and worker.identity and (self._steps(worker.identity) or 0) >= 2:
                self.killed = psutil.Process(worker.identity.pid).ppid()
                os.kill(self.killed, signal.SIGKILL)
        return super().step()

    def _steps(self, who: Process) -> int | None:
        """Of the trial that the worker is in the middle of."""
        mine = (workers.c.pid == who.pid) & attempts.c.outcome.is_(None)
        query = select(attempts.c.step).join(workers, workers.c.id == attempts.c.worker_id).where(mine)
        return self._ledger.look(lambda connection: connection.execute(query).scalar())


def test_an_actor_that_is_killed_is_replaced_and_the_study_is_the_same(tmp_path, ray_cluster):
    """The study is loaded from where Ray has carried it, not from where it was declared, which every node of one host
    sees too."""
    study_file = tmp_path / "mine.py"
    carried = 'return {"custom/carried": float("/runtime_resources/" in __file__), "val/loss"'
    study_file.write_text(Path(TINY).read_text().replace('return {"val/loss"', carried))
    flags = {"reference": str(study_file), "overrides": {"pause": 0.02}}
    golden, _, _ = drive(Home(tmp_path / "inline"), Inline(), 2, **flags)
    executor = Losing(1, NO_GPUS)
    home = Home(tmp_path / "ray")
    digest, _, state = drive(home, executor, 2, **flags)
    assert executor.killed
    assert (state, digest) == ("complete", golden)
    with closing(Ledger(home.storage)) as ledger:
        ended = Counter(ledger.look(lambda c: c.execute(select(attempts.c.outcome)).scalars().all()))
        where = select(reports.c.value).where(reports.c.key == "custom/carried")
        assert set(ledger.look(lambda c: c.execute(where).scalars().all())) == {1.0}
    assert ended.pop("lost") == 1
    assert ended.total() == 2 and ended.keys() <= {"complete", "pruned"}


def test_a_home_that_ray_does_not_see_is_refused_in_one_sentence(tmp_path, ray_cluster, monkeypatch):
    """The marker of the study is gone by the time that its workers look for it, as it is where no home is shared."""
    monkeypatch.setattr("hpo.driver.open.Home.mark", lambda *_: None)
    with pytest.raises(UserError, match=r"home .* is not the one study 'curves' is driven from .* name it with --home"):
        drive(Home(tmp_path / "home"), Ray(1, NO_GPUS))


@pytest.mark.slow
def test_the_flagship_has_the_same_digest_twice(tmp_path):
    """Nothing that the machine decides may be among the metrics a study declares."""
    flags = {"reference": "atft", "window": 2, "overrides": {"train.num_epochs": 1}}
    one, _, _ = drive(Home(tmp_path / "one"), Inline(), 1, **flags)
    two, _, _ = drive(Home(tmp_path / "two"), Inline(), 1, **flags)
    assert one == two
