"""A study in memory: rows as the ledger has them, a sampler that notes what it knows, and trials that train at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from made_rows import trial_row

from hpo.declaration.budget import Budget
from hpo.declaration.goal import NO_GOAL
from hpo.driver.frontier import Actions, Frontier, Past
from hpo.driver.rules import Rules
from hpo.driver.steps import SteppedFrontier
from hpo.ledger.rows import ProposedTrial
from hpo.ledger.transactions import Ask
from hpo.search.population.base import planned_epochs
from hpo.search.promotion.base import RungView
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES

LENGTH = 9  # epochs of a trial that trains to its end
RUNGS = (1, 3)  # epochs at which trials pause under promotion
ENDS = ("complete", "pruned", "infeasible", "failed", "lost")
OBJECTIVES = ({"metric": "loss", "direction": "minimize", "select": "last"},)


def rules(order: str = "ordered", window: int = 2, *, goal=NO_GOAL, **parts: Any) -> Rules:
    """Rules of a study; `trials`, `epochs` and `seconds` among the parts are its budget."""
    budget = Budget(*(parts.pop(name, None) for name in ("trials", "epochs", "seconds")))
    return Rules(order, window, budget, goal, OBJECTIVES, **parts)


class Notes:
    """A proposer that notes for each ask, in `study.asked`, which ends it knew, in order. Where trials pause in order
    it shows the rungs as it knows them."""

    def __init__(self, study: SimulatedStudy, rows: Mapping[int, ProposedTrial], known: Sequence[int]) -> None:
        self._study, self._paused = study, set[int]()
        self._known = [number for number in known if rows[number].state in TERMINAL_STATES]
        self._seen = {n: (row.state if n in known else "running", row.epoch) for n, row in sorted(rows.items())}

    def exhausted(self, number: int) -> str:
        return ""

    def ask(self, number: int, told: int) -> Ask:
        assert told == len(self._known)
        self._study.asked[number] = tuple(self._known)
        self._seen[number] = "running", 0
        config = {"train": {"num_epochs": LENGTH}}
        return Ask(number, 0, number, told, {}, {}, config, "h", descent=self._study.descent(number))

    def tell(self, row: ProposedTrial) -> None:
        number = row.number
        assert number not in self._known, "an end is told once"
        self._seen[number] = row.state, row.epoch
        if row.state == "paused":
            self._paused.add(number)
        else:
            self._known.append(number)

    def adopt(self, row: ProposedTrial) -> None:
        assert row.number not in self._known

    def resume(self, numbers: Sequence[int]) -> None:
        self._paused.difference_update(numbers)
        self._seen |= {number: ("running", self._seen[number][1]) for number in numbers}

    def rungs(self) -> RungView:
        rows = self._study.rows
        if self._study.rules.stepped:
            full = {row["number"]: row["curve"] for row in rows}  # without those that are not committed yet
            curves = {n: [p for p in full.get(n, ()) if p[0] <= epoch] for n, (_, epoch) in self._seen.items()}
            return RungView(curves, {n: state for n, (state, _) in self._seen.items()})
        return RungView({row["number"]: row["curve"] for row in rows}, {row["number"]: row["state"] for row in rows})


@dataclass
class SimulatedStudy:
    """A study whose trial n ends as `ends[n % len(ends)]`, with loss `losses[n % len(losses)]`."""

    rules: Rules
    ends: Sequence[str] = ("complete",)
    losses: Sequence[float] = (1.0,)
    rows: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: bool = False
    forgiven: int = 0
    pauses: dict[int, list[int]] = field(default_factory=dict)
    thaws: list[tuple[int, int]] = field(default_factory=list)

    def frontier(self) -> Frontier:
        """Returns the frontier that a new driver makes of the rows."""
        population = self.rules.population
        going = (row for row in self.rows if row["state"] in OPEN_STATES)
        planned = {
            row["number"]: planned_epochs(row["config"], population, row["number"], row["from_epoch"]) for row in going
        }
        rows = [trial_row(**row) for row in self.rows]
        past = Past(rows, planned, self.forgiven, self.seconds, self.stopped, self.pauses, self.thaws)
        kind = SteppedFrontier if self.rules.stepped else Frontier
        return kind.replay(self.rules, past, lambda rows, known, _: Notes(self, rows, known))

    def drive(self, rng: Random, crashes: float = 0.0, workers: int = 99) -> Frontier:
        """Trains the study to its end in a random order. Each round its driver is replaced with this probability, in
        half of these rounds before it has committed what it decided."""
        frontier = self.frontier()
        while not frontier.done:
            actions = self.turn(frontier, lost := rng.random() < crashes / 2)
            if lost or rng.random() < crashes / 2:
                frontier = self.frontier()
            elif going := self.going():
                self.train(rng.choice(going[:workers]))
            else:
                assert actions != Actions(), "nothing trains, nothing was decided, and the study is not done"
        return frontier

    def turn(self, frontier: Frontier, lost: bool = False) -> Actions:
        """Shows the frontier what has halted and commits what it decides, unless that is `lost`."""
        halted = [row for row in self.rows if row["told"] is None and row["state"] in ("paused", *TERMINAL_STATES)]
        paused = {row["number"] for row in halted if row["state"] == "paused"}
        known = frontier.ended.keys() | (paused & frontier.paused)
        frontier.observe([trial_row(**row) for row in halted if row["number"] not in known], paused)
        actions = frontier.next()
        if not lost:
            self.commit(actions)
        return actions

    def commit(self, actions: Actions) -> None:
        for number in actions.thaw:
            assert self.rows[number]["state"] == "paused"
            self.rows[number]["state"] = "waiting"
        for number, fence, asked in actions.onward:
            assert (self.rows[number]["state"], self.rows[number]["fence"]) == ("paused", fence)
            self.rows[number]["state"] = "waiting"
            self.thaws.append((number, asked))
        for ask in actions.ask:
            assert ask.number == len(self.rows), "numbers are contiguous"
            self.rows.append(_row(ask))
        for number, place in actions.tell:
            row = self.rows[number]
            assert row["state"] in TERMINAL_STATES
            row["told"] = place if row["told"] is None else row["told"]
        for number in actions.retire:
            assert not self.going() or self.rules.population, "what waits is given up last"
            self._end(self.rows[number], "pruned")

    def going(self) -> list[int]:
        """Returns the trials that wait for a worker or train."""
        return [row["number"] for row in self.rows if row["state"] in ("waiting", "running")]

    def train(self, number: int) -> None:
        """Trains a trial to its next rung, or to its end."""
        row, rules = self.rows[number], self.rules
        until = LENGTH
        if rules.promotion:
            until = next((rung for rung in RUNGS if rung > row["epoch"]), LENGTH)
        if rules.population:
            until = min(LENGTH, rules.population.end(number))
        end = self.ends[number % len(self.ends)]
        row["epoch"] = until if end == "complete" or rules.population else min(until, max(row["epoch"], 1))
        place = number + row["epoch"] if rules.stepped else number  # there ranks differ from rung to rung
        row["curve"], row["fence"] = [*row["curve"], (row["epoch"], self.loss(place))], row["fence"] + 1
        if end == "complete" and row["epoch"] < LENGTH:
            row["state"] = "paused"
            self.pauses.setdefault(number, []).append(row["epoch"])
        else:
            self._end(row, end)

    def loss(self, number: int) -> float:
        return self.losses[number % len(self.losses)]

    def trained(self) -> int:
        """Returns the epochs of all trials that were not lost."""
        return sum(row["epoch"] - row["from_epoch"] for row in self.rows if row["outcome"] != "lost")

    def descent(self, number: int) -> dict[str, int]:
        """Returns where a member of a later generation begins."""
        population = self.rules.population
        if population is None or number < population.population:
            return {}
        return {"from_epoch": self.rows[number - population.population]["epoch"]}

    def _end(self, row: dict[str, Any], end: str) -> None:
        row["state"], row["outcome"] = "failed" if end in ("lost", "failed") else end, end
        row["outcome"] = "user_error" if end == "failed" else end
        row["values"] = [self.loss(row["number"])] if end in ("complete", "pruned") else None
        row["error"] = None if row["values"] else f"{end} {row['number']}"


def _row(ask: Ask) -> dict[str, Any]:
    start = ask.descent.get("from_epoch", 0)
    begun = {"number": ask.number, "state": "waiting", "epoch": start, "from_epoch": start, "curve": [], "fence": 0}
    return begun | dict.fromkeys(("outcome", "values", "told", "error", "traceback")) | {"config": ask.config}
