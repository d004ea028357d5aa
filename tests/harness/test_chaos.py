"""SIGKILLs at random times, as many as fall: nothing is lost, nothing is doubled, and every digest is equal.

    EPISODES=50 SEED=monday pytest tests/harness/test_chaos.py -rP

An episode is a study that is run until it is complete, its driver, workers and mirror killed on the way. The times are
drawn from the seed and count from the start of a command, so that kills fall while processes begin and end as well."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from kill import Run, end_all, gone, pid_of
from places import HARNESS
from sqlalchemy import func, select

from hpo.ledger.database.tables import attempts, reports, trials, workers

EPISODES = int(os.environ.get("EPISODES", "2"))
SEED = os.environ.get("SEED", "chaos")
TARGETS = ("driver", "worker", "worker", "mirror", "program")
KILLS = 4  # of an episode, at most
KINDS = {
    "mlp": {"study": "mlp", "name": "mlp", "flags": ("-o", "train.num_epochs=6")},
    "changing": {"study": HARNESS / "changing_study.py", "name": "changing", "flags": ()},
    "patterns": {"study": HARNESS / "patterns_study.yaml", "name": "patterns", "flags": ()},
}
TRIALS = 8
OF_THE_MACHINE = ("system/", "time/", "train/samples_per_sec")


@dataclass(frozen=True)
class Whole:
    """The uninterrupted study."""

    digest: str
    values: dict[tuple, str]
    seconds: float


def prepared(kind: str, home: Path) -> Run:
    study = KINDS[kind]
    extra = ("--workers", "2", "--window", "4", *study["flags"])
    return Run(home, trials=TRIALS, extra=extra, study=study["study"], name=study["name"])


def values_of(run: Run) -> dict[tuple, str]:
    """Returns every value that does not tell how fast the machine was, by trial, step, key and fold."""
    r = reports.c
    place = (trials.c.number, r.step, r.key, r.fold)
    rows = run.query(select(*place, r.value).join(trials, trials.c.id == r.trial_id))
    values = {tuple(row[:-1]): repr(row[-1]) for row in rows}
    assert len(values) == len(rows), "a value stands twice"
    return {place: value for place, value in values.items() if not place[2].startswith(OF_THE_MACHINE)}


def whole(kind: str, home: Path) -> Whole:
    run, begun = prepared(kind, home), time.monotonic()
    run.finished(run.run())
    return Whole(run.status()["digest"], values_of(run), time.monotonic() - begun)


def killed_at_random(run: Run, rng: random.Random, seconds: float) -> Counter[str]:
    """Run the study to its end, and kill on the way; returns how often each target was killed."""
    kills: Counter[str] = Counter()
    process = run.run()
    for _ in range(rng.randint(1, KILLS)):
        due = time.monotonic() + rng.random() * seconds / 2
        while time.monotonic() < due and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        target, pid = next(living(run, process, rng))
        begun = [pid for (pid,) in run.glance(select(workers.c.pid))]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        kills[target] += 1
        if target == "driver":
            run.finished(process, -signal.SIGKILL)
            assert gone(begun), "workers outlive their driver"
            process = run.run()  # which goes on, or begins where there is nothing yet
    run.finished(process)
    return kills


def living(run: Run, process: subprocess.Popen[str], rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yields what lives of the targets, in random order; the driver counts even where it has ended."""
    for target in rng.sample(TARGETS, len(TARGETS)):
        with suppress(psutil.NoSuchProcess):
            if pid := pid_of(target, run, process, rng):
                yield target, pid


def faults(run: Run, uninterrupted: Whole) -> list[str]:
    """Returns the kinds of fault that a study has which was killed on the way."""
    status, values = run.status(), values_of(run)
    told = sorted(place for (place,) in run.query(select(trials.c.told)))
    ended = run.query(select(func.count()).select_from(attempts).where(attempts.c.outcome.is_(None)))
    missing = uninterrupted.values.keys() - values.keys()
    checks = {
        "lost": status["state"] != "complete" or missing or ended != [(0,)],
        "doubled": told != list(range(TRIALS)) or values.keys() - uninterrupted.values.keys(),
        "digest": status["digest"] != uninterrupted.digest or values != uninterrupted.values,
        "leaked": any(key == "state" and value != "0.0" for (_, _, key, _), value in values.items()),
        "verify": "0 differences" not in run.says("verify"),
    }
    return [name for name, faulty in checks.items() if faulty]


@pytest.fixture(autouse=True)
def ended():
    yield
    end_all()


@pytest.mark.slow
@pytest.mark.usefixtures("process")
@pytest.mark.timeout(EPISODES * 300)
@pytest.mark.parametrize("kind", KINDS)
def test_random_kills_lose_nothing_and_double_nothing(tmp_path, kind):
    uninterrupted = whole(kind, tmp_path / "whole")
    kills, broken, seconds, number = Counter[str](), [], uninterrupted.seconds, 0
    for attempt in itertools.count():
        run, rng = prepared(kind, tmp_path / f"{attempt}"), random.Random(f"{SEED} {kind} {attempt}")
        begun = time.monotonic()
        fallen = killed_at_random(run, rng, seconds)
        seconds = min(seconds, time.monotonic() - begun)  # the first study of all imports more
        if told := faults(run, uninterrupted):
            broken.append((attempt, told))
        else:
            shutil.rmtree(run.home)
        kills, number = kills + fallen, number + bool(fallen)  # a study that ended before a kill is not an episode
        if number == EPISODES:
            break
    print(f"\n{kind}: {number} episodes, {kills.total()} kills ({dict(kills)}), faults: {broken}")
    assert not broken, f"of SEED={SEED}"
