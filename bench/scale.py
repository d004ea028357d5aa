"""How a study of many trials weighs on its driver: what a trial costs when there are few and many, how busy it is.

python bench/scale.py [--trials 10000] [--measured 100] [--workers 64] [--seconds 30] [--strategies none ...]

growth   processor time a trial, of the driver's own loop, of what `hpo run` does at its ticks (view, metrics.json)
         and of the worker's path, in a study that has few trials and in one that has --trials: real ones of
         bench/noop.py, the first of them multiplied in the ledger; of a population, whose trials go on from each
         other's checkpoints, all real. Of --measured trials the first quarter is not counted, nor are the sampler's
         asks.
waiting  processor time of a decision of a promoting strategy, and of a look for who goes on, where most trials wait
reports  processor time a second of a driver whose study --workers threads of another process train by the worker's
         own code, each reporting once a second
status   seconds of `hpo status`, start-up included, on the large study
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine

STUDY = str(Path(__file__).with_name("noop.py"))
SEED = 30  # real trials that are multiplied
STRATEGIES = ["none", "median", "percentile", "wilcoxon", "halving", "asha", "hyperband"]
STRATEGIES += ["asha-promote", "hyperband-promote", "pasha", "bohb", "freeze-thaw", "pbt", "pb2"]


class Clocked:
    """Adds up the processor time of this thread that calls take, by name, as it stands after each `ask`; what none of
    them takes is the driver's."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._after: list[dict[str, float]] = []

    def __call__(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*given: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self._seconds[name] += time.thread_time() - start
                if name == "ask":
                    rest = time.thread_time() - sum(self._seconds.values())
                    self._after.append({**self._seconds, "driver": rest})

        return clocked

    def each(self, first: int, last: int) -> dict[str, float]:
        """Milliseconds a trial, of those asked for after the first so many and up to the last."""
        few, many = self._after[first - 1], self._after[last - 1]
        return {name: 1e3 * (many[name] - few.get(name, 0.0)) / (last - first) for name in many}


def driven(
    home: Any, strategy: str, trials: int, executor: Any, clocked: Clocked | None = None, **overrides: Any
) -> None:
    """Drive the study until it has so many trials, as `hpo run` does without its mirror."""
    from hpo.cli.console import Console
    from hpo.cli.live import View
    from hpo.driver.loop import Driver
    from hpo.driver.proposer import LedgerProposer
    from hpo.driver.request import DriverOptions, RunRequest
    from hpo.driver.resolve import declare
    from hpo.ledger import Ledger
    from hpo.storage.metrics_json import Results

    ledger = Ledger(home.create().storage)
    resolved = declare(RunRequest(home, reference=STUDY, strategy=strategy, overrides=overrides), ledger, workers=1)
    driver = Driver(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=trials), executor)
    driver.acquire()
    view = View(ledger, resolved.spec.name, Console(file=io.StringIO()), workers=1)
    results = Results(ledger, resolved.spec.name, home)

    def tick() -> None:
        results.tick()
        view.tick()

    asks = LedgerProposer.ask
    try:
        if clocked is None:
            driver.run(tick)
        else:
            LedgerProposer.ask = clocked("ask", asks)  # type: ignore[method-assign]
            executor.step = clocked("worker", executor.step)
            driver.run(clocked("ticks", tick))
    finally:
        LedgerProposer.ask = asks  # type: ignore[method-assign]
        driver.release()
        ledger.close()


def multiply(home: Any, wanted: int) -> None:
    """Have so many trials in the study of `home`, by copies of those that it has, told in their order."""
    from sqlalchemy import func, insert, select, update

    from hpo.ledger import Ledger, tables

    ledger = Ledger(home.storage, create=False)
    with ledger.write() as connection:

        def rows(table: Any) -> list[dict[str, Any]]:
            return [dict(row) for row in connection.execute(select(table)).mappings()]

        trials, base = rows(tables.trials), connection.execute(select(func.max(tables.trials.c.id))).scalar_one()
        copies = {table: rows(table) for table in (tables.asks, tables.attempts, tables.reports, tables.decisions)}
        paused = sum(trial["told"] is None for trial in trials)
        for start in range(len(trials), wanted, len(trials)):
            shift = base * (start // len(trials))
            told = start - paused * (start // len(trials))
            connection.execute(
                insert(tables.trials),
                [
                    one
                    | {"id": one["id"] + shift, "number": one["number"] + start}
                    | {"told": None if one["told"] is None else one["told"] + told}
                    for one in trials
                ],
            )
            for table, found in copies.items():
                if found:
                    connection.execute(
                        insert(table),
                        [one | {"trial_id": one["trial_id"] + shift, "claim": None} for one in found]
                        if "claim" in table.c
                        else [one | {"trial_id": one["trial_id"] + shift} for one in found],
                    )
        connection.execute(update(tables.studies).values(state="open"))
    ledger.close()


def growth(directory: Path, strategy: str, trials: int, measured: int) -> None:
    """Print what a trial costs in a small and in a large study."""
    from hpo.search.population.base import breeding

    costs = (bred if breeding(strategy) else multiplied)(directory, strategy, trials, measured)
    for number, cost in costs.items():
        parts = ", ".join(f"{part} {cost[part]:.2f}" for part in ("driver", "ticks", "worker", "ask"))
        print(f"growth  {strategy:17} {number:6} trials: {parts} ms a trial")
    small, large = (cost["driver"] + cost["ticks"] for cost in costs.values())
    print(f"growth  {strategy:17} the driver's at the end over that at the start: {large / small:.2f}")


def multiplied(directory: Path, strategy: str, trials: int, measured: int) -> dict[int, dict[str, float]]:
    """How many trials there are -> what one costs, where the first are copied."""
    from hpo.storage.home import Home
    from hpo.workers.executors.inline import Inline

    costs = {}
    for name, before in (("small", SEED), ("large", trials - measured)):
        home = Home(directory / f"{strategy}-{name}")
        driven(home, strategy, SEED, Inline())
        multiply(home, before)
        before = max(before, SEED)
        before += -before % SEED
        driven(home, strategy, before + 1, Inline())  # writes what the copies lack
        clocked = Clocked()
        driven(home, strategy, before + 1 + measured, Inline(), clocked)
        costs[before + 1 + measured] = clocked.each(measured // 4, measured)
    return costs


def bred(directory: Path, strategy: str, trials: int, measured: int) -> dict[int, dict[str, float]]:
    """How many trials there are -> what one costs, in one study whose trials save and go on from each other."""
    from hpo.storage.home import Home
    from hpo.workers.executors.inline import Inline

    clocked = Clocked()
    driven(Home(directory / f"{strategy}-large"), strategy, trials, Inline(), clocked, reports=trials, saves=True)
    return {n: clocked.each(n - measured + measured // 4, n) for n in (measured, trials)}


def waiting(directory: Path, strategy: str) -> None:
    """Print what a decision takes, and a look for who goes on, where two thirds of the trials wait at their rungs."""
    from sqlalchemy import update

    from hpo.declaration.references import load
    from hpo.ledger import Ledger
    from hpo.ledger.history import Curves, LedgerHistory
    from hpo.ledger.tables import trials
    from hpo.search.promotion.base import RungView, promoting
    from hpo.storage.home import Home

    promotes = promoting(strategy)
    if promotes is None:
        return
    ledger, curves = Ledger(Home(directory / f"{strategy}-large").storage), Curves(1, [load(STUDY).objectives[0]])
    stopped = (trials.c.state == "pruned") & (trials.c.number % 3 > 0)
    with ledger.write() as connection:
        connection.execute(update(trials).where(stopped).values(state="paused", told=None))
    with ledger.read() as connection:
        curves.refresh(connection, None)
        paused = [number for number, state in curves.states.items() if state == "paused"]
        number = min(paused, key=lambda number: curves.curves[number][-1][0])  # at the first rung, where most are
        epoch = curves.curves[number][-1][0]
        trial = connection.execute(trials.select().where(trials.c.number == number)).one()
        board = RungView(curves.curves, curves.states, {}, curves.order)

        def decide() -> None:
            promotes.decide(LedgerHistory(curves, connection, trial.id, number, epoch, None))

        for name, call in (("a decision", decide), ("who goes on", lambda: promotes.promote(board, False))):
            took = []
            for _ in range(7):
                start = time.thread_time()
                call()
                took.append(time.thread_time() - start)
            print(f"waiting {strategy:17} {len(board.waiting)} of {len(board.states)}: {name} {1e3 * min(took):.2f} ms")
    ledger.close()


class Elsewhere:
    """An executor whose workers are threads of another process, each with a trial that reports once a second."""

    name = "elsewhere"

    def __init__(self, workers: int) -> None:
        self._workers, self.codes = workers, dict[tuple[str, int], int]()

    def start(self, context: Any) -> None:
        given = json.dumps([context.storage, str(context.home.root), context.study_id, self._workers])
        self._process = subprocess.Popen([sys.executable, __file__, "--serve", given])

    def step(self) -> bool:
        return False

    def preempt(self) -> None:
        self._process.terminate()

    kill = preempt

    def stop(self, grace: float) -> None:
        self._process.terminate()
        self._process.wait()


def serve(storage: str, root: str, study_id: int, workers: int) -> None:
    """Train as so many workers, until terminated; a report of the trial's own waits for its second."""
    import bench.noop
    from hpo.ledger import Ledger
    from hpo.storage.home import Home
    from hpo.workers.reporter import LedgerReporter
    from hpo.workers.worker import Worker

    report, mine = LedgerReporter.report, threading.local()

    def paced(self: Any, *given: Any, **named: Any) -> Any:
        now = time.monotonic()
        mine.due = max(getattr(mine, "due", now) + 1.0, now)  # what was late is not made up for
        time.sleep(mine.due - now)
        return report(self, *given, **named)

    LedgerReporter.report = paced  # type: ignore[method-assign]
    assert bench.noop.REPORTS

    def work() -> None:
        worker = Worker(Ledger(storage, create=False, patience=60.0), Home(Path(root)), "elsewhere")
        while True:
            if not worker.run_one([study_id]):
                time.sleep(0.2)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def reports(directory: Path, workers: int, seconds: float) -> None:
    """Print how busy a driver is whose workers report once a second each."""
    from hpo.driver.loop import Driver
    from hpo.driver.request import DriverOptions, RunRequest
    from hpo.driver.resolve import declare
    from hpo.ledger import Ledger, queries
    from hpo.storage.home import Home

    count = "SELECT count(*) FROM (SELECT DISTINCT trial_id, step FROM reports) AS told"
    home = Home(directory / "reports")
    ledger = Ledger(home.create().storage)
    resolved = declare(RunRequest(home, reference=STUDY, strategy="asha", window=2 * workers), ledger, workers=1)
    driver = Driver(
        ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=10**6), Elsewhere(workers)
    )
    driver.acquire()
    marks: list[tuple[float, float, float]] = []

    def tick() -> None:
        now = time.monotonic()
        if not marks or now - marks[0][0] > seconds:
            with ledger.read() as connection:
                steps = connection.exec_driver_sql(count).scalar_one()
            if steps:
                marks.append((now, time.process_time(), steps))
        if len(marks) > 1:
            driver.request_stop()

    try:
        driver.run(tick)
    finally:
        driver.release()
    with ledger.read() as connection:
        states = queries.status(connection, resolved.spec.name).trials
    wall, busy, steps = (marks[1][i] - marks[0][i] for i in range(3))
    ended = states["complete"] + states["pruned"]
    print(f"reports {workers} workers, {steps / wall:.1f} reports a second, {ended} trials have ended")
    print(f"reports the driver is busy for {busy / wall:.2f} of a processor")
    ledger.close()


def status(root: Path) -> None:
    command = [sys.executable, "-m", "hpo", "status", "--home", str(root)]
    took, busy = [], []
    for _ in range(5):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(time.monotonic() - start)
        busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"status  {min(took):.2f} to {max(took):.2f} s, of a processor {min(busy):.2f} to {max(busy):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10000)
    parser.add_argument("--measured", type=int, default=200)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*json.loads(given.serve))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        for strategy in given.strategies:
            growth(Path(directory), strategy, given.trials, given.measured)
            waiting(Path(directory), strategy)
        if given.strategies:
            status(Path(directory) / f"{given.strategies[0]}-large")
        if given.workers:
            reports(Path(directory), given.workers, given.seconds)


if __name__ == "__main__":
    main()
