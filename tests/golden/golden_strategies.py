"""The decisions of strategies over fixed learning curves, in simulated time; golden_search.py takes the digests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import golden_samplers as studies

from hpo import Bool, Choice, Float, Int
from hpo.search.pareto import beyond
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy, RungView
from hpo.search.samplers.base import TrialRecord
from hpo.search.strategies.base import Strategy
from hpo.search.strategies.registry import make_strategy
from hpo.search.strategies.table_history import TableHistory
from hpo.space.space import Space

Curves = dict[int, list[tuple[int, Any]]]

# Every option is spelled out, since a study keeps its options and a new default is none of its business.
ASHA = {"min_epochs": 1, "eta": 2, "max_epochs": None}
MEDIAN = {"n_startup_trials": 2, "n_warmup_epochs": 1, "interval": 1, "n_min_trials": 1}
PBT = {"population": 6, "interval": 2, "quantile": 0.45, "resample": 0.25, "perturb": None}
SPECS: dict[str, list[dict[str, Any]]] = {
    "median": [MEDIAN, MEDIAN | {"interval": 3, "n_warmup_epochs": 2, "n_min_trials": 3}],
    "percentile": [MEDIAN | {"percentile": 25.0}, MEDIAN | {"percentile": 60.0, "interval": 2}],
    "patient": [
        {"strategy": None, "patience": 1, "min_delta": 0.0},
        {"strategy": {"name": "median", **MEDIAN}, "patience": 0, "min_delta": 0.01},
    ],
    "threshold": [
        {"lower": None, "upper": 1.0, "n_warmup_epochs": 0, "interval": 1},
        {"lower": 0.2, "upper": 1.3, "n_warmup_epochs": 2, "interval": 3},
    ],
    "wilcoxon": [{"p_threshold": 0.1, "n_startup_epochs": 2}, {"p_threshold": 0.3, "n_startup_epochs": 4}],
    "paired": [
        {"parts": 5, "p_threshold": 0.05, "n_startup": 2},
        {"parts": 8, "p_threshold": 0.3, "n_startup": 3},
    ],
    "halving": [
        ASHA | {"early_stopping_rate": 0, "bootstrap": 0},
        ASHA | {"eta": 3, "early_stopping_rate": 1, "bootstrap": 3},
    ],
    "asha": [ASHA, ASHA | {"min_epochs": 2, "eta": 3}, ASHA | {"max_epochs": 6}],
    "hyperband": [ASHA | {"seed": 0}, ASHA | {"eta": 3, "max_epochs": 9, "seed": 7}],
    "asha-promote": [ASHA, ASHA | {"min_epochs": 2, "eta": 3, "max_epochs": 9}],
    "pasha": [ASHA | {"percentile": 90.0}, ASHA | {"percentile": 60.0}, ASHA | {"eta": 3, "percentile": 50.0}],
    "hyperband-promote": [ASHA | {"brackets": 3, "seed": 0}, ASHA | {"eta": 3, "brackets": 2, "seed": 7}],
    "freeze-thaw": [ASHA | {"min_epochs": 2}, ASHA | {"min_epochs": 2, "eta": 3, "max_epochs": 9}],
    "bohb": [ASHA | {"brackets": 2, "seed": 3}, ASHA | {"eta": 3, "brackets": 3, "seed": 1}],
    "pbt": [PBT, PBT | {"quantile": 0.5, "resample": 0.0, "perturb": ["lr", "layers", "name", "momentum"]}],
    "pb2": [PBT, PBT | {"interval": 1, "perturb": ["hidden", "layers", "lr", "momentum"]}],
}
# These take constraints and several objectives.
RANKED = ("paired", "asha", "halving", "hyperband", "asha-promote", "hyperband-promote", "bohb")


def strategy(name: str, chosen: Mapping[str, Any]) -> Any:
    """Returns the decisions of a strategy, with each of several sets of options."""
    return [_decisions(make_strategy({"name": name, **options}), chosen) for options in SPECS.get(name, [{}])]


def _decisions(made: Strategy, chosen: Mapping[str, Any]) -> Any:
    if isinstance(made, PopulationStrategy):
        spaces = {"conditional": (POPULATED, False), "with rules": (POPULATED_BY_RULES, True)}
        return {title: generations(made, space, ruled, chosen) for title, (space, ruled) in spaces.items()}
    tables = {"one objective": curves(trials=14 if made.name == "wilcoxon" else 30)}  # its tests take their time
    if made.name == "pasha":
        tables |= {"crossing": crossing_curves()}
    if made.name in RANKED:
        tables |= {"constrained": curves(constrained=True), "two objectives": curves(several=True)}
    if isinstance(made, PromotionStrategy):
        return {title: _promoted(made, table) for title, table in tables.items()}
    return {title: _stopped(made, table) for title, table in tables.items()}


def curves(several: bool = False, constrained: bool = False, trials: int = 30) -> Curves:
    """Returns number -> learning curve: noisy, with ties, of several lengths, at times NaN or with epochs left out."""
    random = Random(11).random
    table: Curves = {}
    for number in range(trials):
        level, other = random(), random()
        epochs = range(1, 13 if random() < 0.8 else 2 + int(random() * 10), 2 if number % 7 == 3 else 1)
        losses = [math.nan if random() < 0.04 else round(20 * (level + random() / epoch)) / 20 for epoch in epochs]
        violation = number % 3 * 0.5 if constrained and number % 4 == 1 else 0.0
        table[number] = [
            (epoch, beyond((loss, round(other - loss / 3, 2)) if several else loss, violation))
            for epoch, loss in zip(epochs, losses, strict=True)
        ]
    return table


def crossing_curves() -> Curves:
    """Returns number -> learning curve whose noise does not fall, so that rankings change between rungs."""
    random, table = Random(11).random, Curves()
    for number in range(40):
        level = random()
        table[number] = [(epoch, round(1000 * (level + 0.2 * random())) / 1000) for epoch in range(1, 17)]
    return table


def _verdict(made: Strategy, history: TableHistory) -> Any:
    """Returns the verdict without its reason; a strategy that does not want to decide lets the trial go on."""
    verdict = made.decide(history) if made.wants(history.epoch) else None
    return ["continue"] if verdict is None else [verdict.kind, *filter(None, (verdict.checkpoint, verdict.params))]


# --- Trials that stop


def _stopped(made: Strategy, table: Curves) -> Any:
    """Returns the verdicts on trials one after the other, which stop, and on all reports once half of them are over."""
    stopping: dict[str, Any] = {}
    seen: Curves = {}
    states: dict[int, str] = {}
    for number, curve in table.items():
        states[number] = "running"
        for length, (epoch, _) in enumerate(curve, 1):
            seen[number] = curve[:length]
            stopping[f"{number} {epoch}"] = verdict = _verdict(
                made, TableHistory(number, epoch, seen, states, number - 3)
            )
            if verdict[0] == "stop":
                break
        states[number] = "complete" if len(seen[number]) == len(curve) else "pruned"
    over = {number: "complete" if number % 2 else "running" for number in table}
    running = [number for number, state in over.items() if state == "running"]
    late = [_verdict(made, TableHistory(n, epoch, table, over)) for n in running for epoch, _ in table[n]]
    return {"stopping": stopping, "late": late}


# --- Trials that pause


def _promoted(made: PromotionStrategy, table: Curves) -> Any:
    """Returns the study of one worker, and that of three where trials are judged by their least loss."""
    return [Rounds(made, table, workers, by_best).run() for workers, by_best in ((1, False), (3, True))]


class Rounds:
    """A study on learning curves in which each running trial reports once a round."""

    def __init__(self, made: PromotionStrategy, table: Curves, workers: int, by_best: bool) -> None:
        self._made, self._table, self._workers, self._by_best = made, table, workers, by_best
        self._seen: Curves = {}
        self._states: dict[int, str] = {}

    def run(self) -> Any:
        """Returns the trials in the order in which they began or went on, the verdicts, and the final states."""
        begun: list[tuple[int, int]] = []
        verdicts: dict[str, Any] = {}
        while True:
            while self._running < self._workers and (number := self._next()) is not None:
                begun.append((number, len(self._seen.get(number, ()))))
                self._states[number] = "running"
            if not self._running:
                return begun, verdicts, self._states
            for number in [number for number, state in self._states.items() if state == "running"]:
                verdicts[f"{number} {len(self._seen.get(number, ()))}"] = self._report(number)

    @property
    def _running(self) -> int:
        return sum(state == "running" for state in self._states.values())

    def _next(self) -> int | None:
        """Returns the trial to train: one that goes on, else a new one, else None."""
        unasked = len(self._states) < len(self._table)
        points = {number: _features(number) for number in self._states}
        board = RungView(self._seen, self._states, points, by_best=self._by_best)
        promoted = self._made.promote(board, last=not unasked)
        return promoted[0] if promoted else len(self._states) if unasked else None

    def _report(self, number: int) -> Any:
        curve = self._table[number]
        self._seen[number] = curve[: len(self._seen.get(number, ())) + 1]
        epoch = self._seen[number][-1][0]
        verdict = _verdict(self._made, TableHistory(number, epoch, self._seen, self._states))
        state = {"stop": "pruned", "pause": "paused"}.get(verdict[0], "running")
        self._states[number] = "complete" if len(self._seen[number]) == len(curve) else state
        return verdict


def _features(number: int) -> tuple[float, ...]:
    """Returns the features of a trial's configuration, one of which says a little of its losses."""
    return number * 5 % 17 / 17, number * 11 % 23 / 23


# --- Generations

POPULATED = Space(
    {
        "dropout": Float(0.0, 0.5, step=0.1),
        "gat": Bool(),
        "heads": Int(1, 8, powers_of_two=True),
        "hidden": Int(16, 128, multiple_of="heads"),
        "layers": Int(1, 9, step=2),
        "lr": Float(1e-4, 1e-1, log=True, prior=0.01),
        "momentum": Float(0.0, 0.9, when={"name": "sgd"}),
        "name": Choice(["sgd", "adamw", "lion"]),
    }
)
POPULATED_BY_RULES = Space(dict(POPULATED.dimensions), rules=("lr * layers <= 0.2 or momentum >= 0.3",))
GENERATIONS = 4


def generations(made: PopulationStrategy, space: Space, constrained: bool, chosen: Mapping[str, Any]) -> Any:
    """Returns the members of several generations as they are proposed, and the verdicts on their reports."""
    sampler = made.sampler(studies.Places(space), space, [studies.LOSS], studies.SEED, **chosen)
    asked: list[Any] = []
    verdicts: list[Any] = []
    records: dict[int, TrialRecord] = {}
    for number in range(GENERATIONS * made.population):
        proposal = sampler.ask(number)
        asked.append(studies.plain(proposal))
        start = 0 if proposal.parent is None else made.end(proposal.parent)
        record = studies.ended(number, proposal, space, [studies.LOSS], constrained)
        level = studies.loss(space, proposal.coordinates, number)
        curve = [(epoch, level + 1 / epoch) for epoch in range(start + 1, made.end(number) + 1)]
        if record.state == "infeasible" and not constrained:
            curve[-1] = (curve[-1][0], math.nan)
        state = "failed" if record.state == "failed" else "pruned"
        records[number] = replace(record, state=state, curve=curve, values=None)
        verdicts += [_verdict(made, TableHistory(number, epoch, {number: curve})) for epoch, _ in curve]
        if number + 1 == made.begin(number + 1):
            for told in range(made.begin(number), number + 1):
                sampler.tell(records[told])
    return {"asked": asked, "verdicts": verdicts, "ended": bool(sampler.exhausted(len(asked)))}
