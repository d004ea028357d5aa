"""Faults of every kind on studies of every kind, drawn from a seed: nothing is lost, doubled or left hanging.

An episode is one study, run to its end with up to four faults on the way: a process is killed or stopped for longer
than its lease, PostgreSQL crashes, the store of the checkpoints does not answer. The study's kind, its ledger and its
store are drawn so that every pair of them comes about as often as any other. Episode N of a seed draws the same faults
each time; where they fall follows the clock. A journal has a line for each episode, and the next run goes on after it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import s3_server
import sqlalchemy as sa
from kill import Run, end_all, gone, pid_of
from places import HARNESS
from sqlalchemy import func, select
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.ledger.database.tables import attempts, reports, trials, workers
from trainer.files.s3 import Bucket

LEASE = 5  # seconds
STOPPED = 1.4 * LEASE  # a process is stopped for so long
AWAY = 3.0  # seconds for which a server does not answer
MOST = 4  # faults of an episode
HANGS = 300  # seconds after which a study hangs
TARGETS = ("driver", "worker", "worker", "mirror", "program")
OF_THE_MACHINE = ("system/", "time/", "train/samples_per_sec")
LEDGERS, STORES = ("sqlite", "postgres"), ("home", "bucket")


@dataclass(frozen=True)
class Kind:
    """A kind of study: `study` as its name for `hpo run` or a file of this directory, its `name`, and what else it is
    run with."""

    study: str
    name: str
    flags: tuple[str, ...] = ()
    trials: int = 8


KINDS = {
    "task": Kind("tiny_study.py", "tiny", ("-o", "pause=0.0")),
    "mlp": Kind("mlp", "mlp", ("-o", "train.num_epochs=6")),
    "function": Kind("function_study.py", "tiny"),
    "changing": Kind("changing_study.py", "changing"),
    "command": Kind("patterns_study.yaml", "patterns"),
    "lanes": Kind("lanes_study.py", "lanes", ("-o", "train.lanes=4")),
    "promotion": Kind("tiny_study.py", "tiny", ("-o", "pause=0.0", "--strategy", "asha-promote")),
    "population": Kind("population_study.py", "tiny", ("-o", "pause=0.0"), trials=9),
    "ranks": Kind("parts_study.py", "parts", ("-o", "train.parallel.data=2"), trials=4),
}


@dataclass
class Placed(Run):
    """A run whose ledger may be on a server."""

    storage: str = ""

    def query(self, statement: sa.Select) -> list[sa.Row]:
        if not self.storage:
            return super().query(statement)
        with closing(Ledger(self.storage)) as ledger, ledger.read() as connection:
            return list(connection.execute(statement).all())

    def glance(self, statement: sa.Select) -> list[tuple]:
        return [tuple(row) for row in self.query(statement)] if self.storage else super().glance(statement)

    def says(self, *command: str) -> str:
        words = [*command, "--study", self.name, "--home", str(self.home)]
        ran = CliRunner().invoke(app, words, env=self.environ)
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.stdout


@dataclass(frozen=True)
class Whole:
    """The uninterrupted study of a kind: its digest, its values by trial, step, key and fold, and how long it took."""

    digest: str
    values: dict[tuple, str]
    seconds: float


@dataclass(frozen=True)
class Episode:
    """What is drawn for one episode."""

    number: int
    kind: str
    ledger: str
    store: str
    seed: str

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [*itertools.combinations((self.kind, self.ledger, self.store), 2)]


@dataclass
class Ended:
    """A line of the journal: what was drawn, the faults that fell, and what was broken by them."""

    episode: Episode
    fell: dict[str, int]
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def drawn(seed: str, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Episode]:
    """Yields episodes without end: of a few random ones the one whose pairs have come most rarely."""
    seen: Counter[tuple[str, str]] = Counter()
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        some = [
            Episode(number, rng.choice(kinds), rng.choice(LEDGERS), rng.choice(STORES), f"{seed} {number}")
            for _ in range(6)
        ]
        best = min(some, key=lambda episode: sum(seen[pair] for pair in episode.pairs))
        seen.update(best.pairs)
        yield best


class Servers:
    """The PostgreSQL and the S3 of all episodes. `postgres` makes a server when it is first needed."""

    def __init__(self, postgres: Callable[[], Any], s3: tuple[str, psutil.Process], scratch: Path) -> None:
        self._make, self._s3, self._scratch = postgres, s3, scratch
        self._postgres: Any = None

    def environ(self, episode: Episode, name: str) -> dict[str, str]:
        given = {"HPO_LEASE_SECONDS": str(LEASE), "MLFLOW_DISABLE_TELEMETRY": "true"}
        if episode.store == "bucket":
            given |= s3_server.environ(self._s3[0], self._scratch)
        return given | ({"HPO_STORAGE": self.database(name)} if episode.ledger == "postgres" else {})

    def database(self, name: str) -> str:
        self._postgres = self._postgres or self._make()
        engine = sa.create_engine(self._postgres.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
        engine.dispose()
        return self._postgres.url.set(database=name).render_as_string(hide_password=False)

    def bucket(self, name: str) -> str:
        with mock.patch.dict(os.environ, s3_server.environ(self._s3[0], self._scratch)):
            Bucket(f"s3://{name}")._asked(lambda client: client.create_bucket(Bucket=name))
        return f"s3://{name}/checkpoints"

    def crash_postgres(self) -> None:
        self._postgres.stop()
        time.sleep(AWAY)
        self._postgres.start()

    def stop_s3(self) -> None:
        self._s3[1].suspend()
        time.sleep(AWAY)
        self._s3[1].resume()


def prepared(kind: Kind, home: Path, environ: dict[str, str], bucket: str = "") -> Placed:
    study = HARNESS / kind.study if "." in kind.study else kind.study
    extra = ("--workers", "2", "--window", "4", "--learn-from", "none", *kind.flags)
    extra += ("--checkpoints", bucket) if bucket else ()
    storage = environ.get("HPO_STORAGE", "")
    return Placed(home, kind.trials, extra, study=study, name=kind.name, environ=environ, storage=storage)


def values_of(run: Run) -> dict[tuple, str]:
    """Returns every value that does not tell how fast the machine was, by trial, step, key and fold."""
    r = reports.c
    place = (trials.c.number, r.step, r.key, r.fold)
    rows = run.query(select(*place, r.value).join(trials, trials.c.id == r.trial_id))
    values = {tuple(row[:-1]): repr(row[-1]) for row in rows}
    assert len(values) == len(rows), "a value stands twice"
    return {place: value for place, value in values.items() if not place[2].startswith(OF_THE_MACHINE)}


def whole(kind: Kind, home: Path) -> Whole:
    run, begun = prepared(kind, home, {}), time.monotonic()
    run.finished(run.run(), timeout=HANGS)
    return Whole(run.status()["digest"], values_of(run), time.monotonic() - begun)


class Battle:
    """Runs one episode: a study, and the faults that fall on it."""

    def __init__(self, episode: Episode, servers: Servers, directory: Path) -> None:
        self._rng, self._servers = random.Random(episode.seed), servers
        name = f"chaos-{os.getpid()}-{episode.number}"
        bucket = servers.bucket(name) if episode.store == "bucket" else ""
        self.run = prepared(KINDS[episode.kind], directory / name, servers.environ(episode, name), bucket)
        self._faults: list[Callable[[], str]] = [self._kill, self._kill, self._stop]
        self._faults += [self._crash] if episode.ledger == "postgres" else []
        self._faults += [self._silence] if bucket else []
        self._process = self.run.run()

    def fight(self, seconds: float) -> Counter[str]:
        """Runs the study to its end, which takes about so long without faults; returns the faults that fell."""
        fell: Counter[str] = Counter()
        for _ in range(self._rng.randint(1, MOST)):
            due = time.monotonic() + self._rng.random() * seconds / 2
            while time.monotonic() < due and self._process.poll() is None:
                time.sleep(0.005)
            if self._process.poll() is not None:
                break
            fault = self._rng.choice(self._faults)()
            fell.update([fault] if fault else [])
        self.run.finished(self._process, timeout=HANGS)
        return fell

    def _target(self) -> tuple[str, int]:
        """Returns a process that lives, and what it is; the driver counts even where it has ended."""
        for target in self._rng.sample(TARGETS, len(TARGETS)):
            with suppress(psutil.NoSuchProcess):
                if pid := pid_of(target, self.run, self._process, self._rng):
                    return target, pid
        raise AssertionError("a driver has a pid")

    def _kill(self) -> str:
        target, pid = self._target()
        begun = [pid for (pid,) in self.run.glance(select(workers.c.pid))]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        if target == "driver":
            self.run.finished(self._process, -signal.SIGKILL)
            assert gone(begun), "workers outlive their driver"
            self._process = self.run.run()  # which goes on, or begins where there is nothing yet
        return f"{target} killed"

    def _stop(self) -> str:
        """Stops a worker for longer than its lease, another process for less."""
        target, pid = self._target()
        try:
            stopped = psutil.Process(pid)
            stopped.suspend()
            time.sleep(STOPPED if target == "worker" else LEASE / 4)
            stopped.resume()
        except psutil.NoSuchProcess:
            return ""
        return f"{target} stopped"

    def _crash(self) -> str:
        self._servers.crash_postgres()
        return "PostgreSQL crashed"

    def _silence(self) -> str:
        self._servers.stop_s3()
        return "S3 silent"


def faults(run: Run, uninterrupted: Whole) -> list[str]:
    """Returns the kinds of fault that a study has after an episode."""
    status, values = run.status(), values_of(run)
    rows = run.query(select(trials.c.told, trials.c.state))
    told = sorted(place for place, state in rows if state != "paused" and place is not None)
    ended = run.query(select(func.count()).select_from(attempts).where(attempts.c.outcome.is_(None)))
    missing = uninterrupted.values.keys() - values.keys()
    checks = {
        "lost": status["state"] != "complete" or missing or ended != [(0,)] or len(rows) != run.trials,
        "doubled": told != list(range(len(told))) or values.keys() - uninterrupted.values.keys(),
        "digest": status["digest"] != uninterrupted.digest or values != uninterrupted.values,
        "leaked": any(key == "state" and value != "0.0" for (_, _, key, _), value in values.items()),
        "verify": "0 differences" not in run.says("verify"),
    }
    return [name for name, faulty in checks.items() if faulty]


def fought(episode: Episode, servers: Servers, uninterrupted: Whole, directory: Path) -> Ended:
    """Runs an episode; its home is deleted unless something is broken."""
    begun = time.monotonic()
    battle = Battle(episode, servers, directory)
    ended = Ended(episode, {})
    try:
        ended.fell = dict(battle.fight(uninterrupted.seconds))
        ended.broken = faults(battle.run, uninterrupted)
    except subprocess.TimeoutExpired:
        ended.broken = ["hung"]
    except AssertionError as error:
        ended.broken = [f"failed: {str(error)[-2000:]}"]
    finally:
        end_all()
    if not ended.broken:
        shutil.rmtree(battle.run.home)
    ended.seconds = round(time.monotonic() - begun, 1)
    return ended


def table(journal: Path) -> str:
    """Returns the faults of a journal by kind, and what is broken, by the seed of its episode."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    fell: Counter[str] = Counter()
    for line in lines:
        fell.update(line["fell"])
    minutes = sum(line["seconds"] for line in lines) / 60
    broken = [f"{line['episode']['seed']}: {', '.join(line['broken'])}" for line in lines if line["broken"]]
    rows = [f"{count:5d}  {fault}" for fault, count in fell.most_common()]
    total = f"{len(lines)} episodes, {fell.total()} faults in {minutes:.0f} min, {len(broken)} broken"
    return "\n".join([total, *rows, *broken])
