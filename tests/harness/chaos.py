"""Faults of every kind on studies of every kind, drawn from a seed: nothing is lost, doubled or left hanging.

An episode is one study, run to its end with up to four faults on the way: a process is killed or stopped for longer
than its lease, PostgreSQL crashes, the store of the checkpoints does not answer. Two of five episodes have two hosts,
of the driver and of a worker that has joined, and a fault of the network between them and the servers. The study's
kind, its ledger, its store and the network's fault are drawn so that every pair of them comes about as often as any
other. Episode N of a seed draws the same faults each time; where they fall follows the clock. A journal has a line for
each episode, and the next run goes on after it.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import apart
import psutil
import sqlalchemy as sa
from kill import Run, end_all, gone, pid_of
from namespaces import HOST
from places import HARNESS
from servers import Servers
from sqlalchemy import func, select
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.ledger.database.tables import attempts, reports, studies, trials, workers

LEASE = 5  # seconds
STOPPED = 1.4 * LEASE  # a process is stopped for so long
SEVERAL_HOSTS = 0.4  # of the episodes
MOST = 4  # faults of an episode
HANGS = 300  # seconds after which a study hangs
TARGETS = ("driver", "worker", "worker", "mirror", "program", "joined")
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
    window: tuple[str, ...] = ("--window", "4")


KINDS = {
    "task": Kind("tiny_study.py", "tiny", ("-o", "pause=0.0")),
    "mlp": Kind("mlp", "mlp", ("-o", "train.num_epochs=6")),
    "function": Kind("function_study.py", "tiny"),
    "changing": Kind("changing_study.py", "changing"),
    "command": Kind("patterns_study.yaml", "patterns"),
    "lanes": Kind("lanes_study.py", "lanes", ("-o", "train.lanes=4")),
    "promotion": Kind("tiny_study.py", "tiny", ("-o", "pause=0.0", "--strategy", "asha-promote", "--order", "ordered")),
    "population": Kind("population_study.py", "tiny", ("-o", "pause=0.0"), trials=12, window=()),
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
        if HOST in self.environ and "verify" in command:  # this host does not know the tracker's name
            return self.finished(self.start(*command, "--study", self.name))
        words = [*command, "--study", self.name, "--home", str(self.home)]
        ran = CliRunner().invoke(app, words, env=self.environ | ({"HPO_STORAGE": self.storage} if self.storage else {}))
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
    network: str = ""  # the fault of the network of several hosts, if it has them

    @property
    def pairs(self) -> list[tuple[str, str]]:
        axes = (self.kind, self.ledger, self.store, self.network)
        return [*itertools.combinations(filter(None, axes), 2)]


@dataclass
class Ended:
    """A line of the journal: what was drawn, the faults that fell, and what was broken by them."""

    episode: Episode
    fell: dict[str, int]
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def drawn(seed: str, kinds: tuple[str, ...] = tuple(KINDS), *, hosts: bool = True) -> Iterator[Episode]:
    """Yields episodes without end: of a few random ones the one whose pairs have come most rarely.

    Without `hosts` those of several hosts have one, and the others are the same.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        several = rng.random() < SEVERAL_HOSTS
        ledgers, networks = (("postgres",), apart.FAULTS) if several else (LEDGERS, ("",))
        axes = (kinds, ledgers, STORES, (f"{seed} {number}",), networks)
        some = [Episode(number, *map(rng.choice, axes)) for _ in range(6)]
        best = min(some, key=lambda episode: sum(seen[pair] for pair in episode.pairs))
        seen.update(best.pairs)
        yield best if hosts else replace(best, network="")


def prepared(kind: Kind, home: Path, environ: dict[str, str], bucket: str = "") -> Placed:
    study = HARNESS / kind.study if "." in kind.study else kind.study
    extra = ("--workers", "2", *kind.window, "--learn-from", "none", *kind.flags)
    extra += ("--checkpoints", bucket) if bucket else ()
    storage = environ.get("HPO_STORAGE", "")
    return Placed(home, kind.trials, extra, study=study, name=kind.name, environ=environ, storage=storage)


def searched(run: Run) -> sa.ColumnElement[bool]:
    """Returns the condition on trials that keeps those of the search.

    Its end phase starts a trial from its checkpoint or, if that is in a bucket, from its start, so the values of that
    trial differ between stores.
    """
    return trials.c.study_id == select(studies.c.id).where(studies.c.name == run.name).scalar_subquery()


def values_of(run: Run) -> dict[tuple, str]:
    """Returns every value that does not tell how fast the machine was, by trial, step, key and fold."""
    r = reports.c
    place = (trials.c.number, r.step, r.key, r.fold)
    rows = run.query(select(*place, r.value).join(trials, trials.c.id == r.trial_id).where(searched(run)))
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
        self.fell: Counter[str] = Counter()
        name = f"chaos-{os.getpid()}-{episode.number}"
        bucket = servers.bucket(name) if episode.store == "bucket" else ""
        environ = {"HPO_LEASE_SECONDS": str(LEASE)}
        environ |= servers.environ(name, postgres=episode.ledger == "postgres", bucket=bool(bucket))
        self.run = prepared(KINDS[episode.kind], directory / name, environ, bucket)
        self._faults: list[Callable[[], str]] = [self._kill, self._kill, self._stop]
        self._faults += [self._crash] if episode.ledger == "postgres" else []
        self._faults += [self._silence] if bucket else []
        self._usual, self._apart = [*self._faults], None
        if episode.network and servers.network:
            self._faults += [self._cut] * len(self._faults)
            with closing(Ledger(self.run.storage)):  # a worker may join before the driver has made it
                self._apart = apart.Apart(episode.network, servers, servers.network, LEASE)
            self.run = self._apart.on_driver(self.run)
        self._process = self.run.run()

    def fight(self, seconds: float) -> None:
        """Runs the study to its end, which takes about so long without faults, and counts the faults that fall."""
        for _ in range(self._rng.randint(1, MOST)):
            due = time.monotonic() + self._rng.random() * seconds / 2
            while time.monotonic() < due and self._process.poll() is None:
                time.sleep(0.005)
            if self._process.poll() is not None:
                break
            if self._apart:
                self._apart.supervise()
            self._fall(self._faults)
        output = self.run.finished(self._process, timeout=HANGS)
        assert "Traceback" not in output, output
        if self._apart:
            self._apart.finished()

    def close(self) -> None:
        end_all()
        if self._apart:
            self._apart.close()

    def _fall(self, faults: list[Callable[[], str]]) -> None:
        fault = self._rng.choice(faults)()
        self.fell.update([fault] if fault else [])

    def _cut(self) -> str:
        assert self._apart
        return self._apart.strike(self._rng, lambda: self._fall(self._usual))

    def _target(self) -> tuple[str, int]:
        """Returns a process that lives, and what it is; the driver counts even where it has ended."""
        for target in self._rng.sample(TARGETS, len(TARGETS)):
            with suppress(psutil.NoSuchProcess):
                pid = self._joined() if target == "joined" else pid_of(target, self.run, self._process, self._rng)
                if pid:
                    return target, pid
        raise AssertionError("a driver has a pid")

    def _joined(self) -> int | None:
        """Returns the pid of the worker on the other host, None if there is none."""
        process = self._apart and self._apart.joined
        return process.pid if process and process.poll() is None else None

    def _kill(self) -> str:
        target, pid = self._target()
        begun = [pid for (pid,) in self.run.glance(select(workers.c.pid)) if pid != self._joined()]
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
            time.sleep(STOPPED if target in ("worker", "joined") else LEASE / 4)
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
    rows = run.query(select(trials.c.told, trials.c.state).where(searched(run)))
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
        battle.fight(uninterrupted.seconds)
        ended.broken = faults(battle.run, uninterrupted)
    except subprocess.TimeoutExpired as error:
        ended.broken = [f"hung: {str(error.output)[-2000:]}"]
    except AssertionError as error:
        ended.broken = [f"failed: {str(error)[-2000:]}"]
    finally:
        battle.close()
    ended.fell = dict(battle.fell)
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
