"""What a trial costs its driver in a study of few trials and in one of many; bench/scale.py prints it."""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

STUDY = str(Path(__file__).with_name("noop.py"))
SEED = 30  # real trials that are multiplied


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
    from hpo.display.console import Console
    from hpo.display.live import View
    from hpo.driver.loop import Driver
    from hpo.driver.proposer import LedgerProposer
    from hpo.driver.request import DriverOptions, request_of
    from hpo.driver.resolve import declare
    from hpo.ledger import Ledger
    from hpo.storage.metrics_json import Results

    ledger = Ledger(home.create().storage)
    resolved = declare(request_of(home, reference=STUDY, strategy=strategy, overrides=overrides), ledger, workers=1)
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

    from hpo.ledger import Ledger
    from hpo.ledger.database import tables

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
    from hpo.ledger.database.tables import trials
    from hpo.ledger.history import Curves
    from hpo.ledger.strategy_history import LedgerHistory
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
