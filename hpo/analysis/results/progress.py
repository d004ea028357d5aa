"""Reads a study's progress while it runs: what has ended, how far the rest is, how fast it goes. It only reads the
ledger."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.clock import Clock
from hpo.ledger import Ledger, driver_queries, progress_queries, queries
from hpo.ledger.names import machine_dependent
from hpo.ledger.rows import Connection, RowMapping
from hpo.search.ranking import best_of
from hpo.search.strategies.base import make_strategy
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES, UNSETTLED
from hpo.text import command, counted, near, spelled

_REASONS = ("unsaved_attributes", "compiled_shapes", "compiled_again")  # events whose reason says all


@dataclass
class Trial:
    """One trial as it is shown. `curve` holds the first objective's values so far, `values` what it was judged by."""

    number: int
    state: str
    epoch: int
    num_epochs: int | None
    values: list[float | None]
    params: dict[str, Any]
    error: str | None
    curve: list[float] = field(default_factory=list)
    step: int = -1  # up to which the curve has been read
    from_epoch: int = 0
    child: bool = False  # it goes on from another one's checkpoint
    judged: queries.Judged | None = None  # of the best ones: where, and what else was measured there
    undecided: bool = False  # its last report closed an epoch, by all objectives, and has no verdict

    @property
    def why(self) -> str:
        """Why it failed or is infeasible, in a line."""
        return self.error.splitlines()[0] if self.error and self.state in ("failed", "infeasible") else ""

    @property
    def shown(self) -> list[float | None]:
        """A value of each objective that there is one of: until the trial has ended the first one's newest."""
        return self.values if None not in self.values and self.values else [*self.curve[-1:]]


class Progress:
    """A study as far as the ledger tells. `refresh` brings it up to date and returns the trials that have ended since.

    Terminal trials never change, so only those that are new or were open are read, and of curves only new points.
    """

    def __init__(self, ledger: Ledger, name: str, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self.name = name
        self.trials: dict[int, Trial] = {}
        self.states: Counter[str] = Counter()  # kept beside the trials: of many they are not counted again each time
        self.epochs = 0
        self.replaced = 0  # trials in whose place another went on, as a population of Ray Tune's perturbs them
        self._open: set[int] = set()
        self._next = 0  # above every number so far
        self._heard, self._untold = False, ""  # whether a trial's first epoch was looked at for the objectives
        self.best: list[Trial] = []  # one, or with several objectives the Pareto front
        row = ledger.look(lambda connection: queries.study_row(connection, name))
        self._id: int = row["id"]
        self.requested: int | None = row["requested"] or None
        self.max_epochs: int | None = row["max_epochs"]
        self.max_seconds: float | None = row["max_seconds"]
        self.spec: dict[str, Any] = row["spec"]
        self.last_epoch = _last_epoch(row["identity"])
        self._strategy = make_strategy(self.spec["strategy"])
        self.data: dict[str, Any] = row["environment"].get("data", {})
        self.tracking_uri: str = row["environment"]["tracking_uri"]
        self.refresh()
        self.begin()

    def begin(self) -> None:
        """Begin the span of time that rates are of: when the study's driver did, whoever looks on; else now."""
        since = self._ledger.look(lambda connection: progress_queries.driven_since(connection, self._id))
        ago = 0.0 if since is None else max(self._clock.wall() - since, 0.0)
        self._began, self._driven = self._clock.monotonic() - ago, since is not None
        self._halted_before, self._epochs_before = self.ended + self.paused, self.epochs
        if since is not None:
            before = self._ledger.look(lambda connection: progress_queries.by_then(connection, self._id, since))
            self._halted_before = before.halted - (before.children if queries.replaces(self.spec) else 0)
            self._epochs_before = before.epochs

    @property
    def metrics(self) -> list[str]:
        return [one["metric"] for one in self.spec["objectives"]]

    @property
    def ended(self) -> int:
        """Of the trials asked for: one in whose place another went on, as under Ray Tune, is not over."""
        return sum(self.states[state] for state in TERMINAL_STATES) - self.replaced

    @property
    def paused(self) -> int:
        return self.states["paused"]

    @property
    def begins(self) -> bool:
        """Whether nothing has been trained yet since the study's driver, or else this process, began."""
        return (self.ended + self.paused, self.epochs) == (self._halted_before, self._epochs_before)

    @property
    def starts(self) -> bool:
        """Whether the study has a driver, under which nothing has been trained yet."""
        return self._driven and self.begins

    @property
    def keeps_best(self) -> bool:
        """Whether one of the best trials has a checkpoint."""
        numbers = [trial.number for trial in self.best]
        return self._ledger.look(lambda c: any(driver_queries.any_saved(c, self._id, number) for number in numbers))

    @property
    def at_rung(self) -> set[int]:
        """The trials that wait there, by number: in ordered mode for all before them to come so far or end."""
        found, behind = set[int](), math.inf
        if self.spec["order"] != "ordered":
            return found
        for trial in (self.trials[number] for number in sorted(self._open)):
            if behind < trial.epoch and self._asks(trial):
                found.add(trial.number)
            if trial.state in UNSETTLED:
                behind = min(behind, trial.epoch)
        return found

    def _asks(self, trial: Trial) -> bool:
        """Whether the strategy has yet to answer its last report."""
        return trial.undecided and trial.epoch != trial.num_epochs and self._strategy.wants(trial.epoch)

    @property
    def elapsed(self) -> float:
        return self._clock.monotonic() - self._began

    def rates(self) -> tuple[float, float]:
        """Trials a minute, that ended or paused, and epochs a second, over the time since `begin`."""
        elapsed, halted = max(self.elapsed, 1e-9), self.ended + self.paused
        return 60 * (halted - self._halted_before) / elapsed, (self.epochs - self._epochs_before) / elapsed

    def eta(self) -> float | None:
        """Seconds left at the rate so far, by trials or by epochs; None until a trial has ended."""
        per_minute, per_second = self.rates()
        if not per_minute:
            return None
        left = [] if self.requested is None else [60 * max(self.requested - self.ended - self.paused, 0) / per_minute]
        if self.max_epochs is not None and per_second:
            left.append(max(self.max_epochs - self.epochs, 0) / per_second)
        return min(left, default=None)

    def counts(self, *, noun: bool = False) -> str:
        """`3/50 trials, 9 paused`, `3 trials, 40/200 epochs`: how much of what was asked for has ended; `3/50` without
        `noun`."""
        text = f"{self.ended}/{self.requested}" if self.requested else str(self.ended)
        if noun:
            text += " trial" if (self.requested or self.ended) == 1 else " trials"
        text += f", {self.paused} paused" if self.paused else ""
        return text + (f", {self.epochs}/{self.max_epochs} epochs" if self.max_epochs else "")

    def asked_for(self) -> str:
        """`50 trials or 200 epochs or 2h`: the budget, of which what is reached first ends the study."""
        bounds = [
            counted(self.requested, "trial") if self.requested else "",
            counted(self.max_epochs, "epoch") if self.max_epochs else "",
        ]
        return " or ".join(filter(None, [*bounds, spelled(self.max_seconds) if self.max_seconds else ""]))

    def refresh(self) -> list[Trial]:
        """Read what is new; the trials that have ended or paused since."""
        fresh, points = self._ledger.look(self._read)
        waited = {number for number in self._open if self.trials[number].state == "paused"}
        paused = {trial.number for trial in fresh if trial.state == "paused"} - waited
        for trial in fresh:
            if known := self.trials.get(trial.number):
                trial.curve, trial.step = known.curve, known.step
                self.states[known.state] -= 1
                self.epochs -= known.epoch - known.from_epoch
            else:
                self.replaced += trial.child and queries.replaces(self.spec)
            self.trials[trial.number] = trial
            self._next = max(self._next, trial.number + 1)
            (self._open.discard if trial.state in TERMINAL_STATES else self._open.add)(trial.number)
            self.states[trial.state] += 1
            self.epochs += trial.epoch - trial.from_epoch
        for number, _, step, _, value in points:
            trial = self.trials[number]
            if step > trial.step:
                trial.curve.append(value)
                trial.step = step
        scored = [trial for trial in fresh if trial.state == "complete" and trial.values and None not in trial.values]
        if scored and not self.spec.get("listed"):  # of what a list has asked for none is chosen
            values: dict[int, Any] = {trial.number: trial.values for trial in (*self.best, *scored)}
            self.best = [self.trials[number] for number in best_of(self.spec["objectives"], values)]
            self._look_at([trial for trial in self.best if trial.judged is None])
        if not self._heard:
            self._listen(fresh)
        return [trial for trial in fresh if trial.state in TERMINAL_STATES or trial.number in paused]

    def _look_at(self, found: Sequence[Trial]) -> None:
        """Read where trials were judged."""
        numbers = [trial.number for trial in found]

        def look(connection: Connection) -> dict[int, queries.Judged]:
            rows = queries.numbered(connection, self._id, numbers)
            judged = queries.judged(connection, queries.study_row(connection, self.name), rows)
            return {row["number"]: judged[row["id"]] for row in rows if row["id"] in judged}

        judged = self._ledger.look(look)
        for trial in found:
            trial.judged = judged.get(trial.number)

    def untold(self) -> str:
        """What the user is to be told, once."""
        text, self._untold = self._untold, ""
        return text

    def remarks(self) -> Iterator[str]:
        """What befell trials that went on all the same."""
        kinds = ("warmup_not_over", "unread_options", "gpu_not_measured", "skipped_step", *_REASONS)
        found = self._ledger.look(lambda connection: progress_queries.befell(connection, self._id, kinds))
        if cold := found.get("warmup_not_over"):
            yield (
                f"in {counted(cold.trials, 'trial')} the warmup was longer than the run, so train.optim.lr was never "
                "reached: shorten train.schedule.warmup_*, or train for longer"
            )
        if unread := found.get("unread_options"):
            why = (unread.reason or "").rstrip(".")
            yield f"in {counted(unread.trials, 'trial')} not all was read of what is set: {why}"
        if unmeasured := found.get("gpu_not_measured"):
            yield unmeasured.reason or ""
        for befallen in (found[kind] for kind in _REASONS if kind in found):
            yield f"in {counted(befallen.trials, 'trial')} {(befallen.reason or '').rstrip('.')}"
        if skipped := found.get("skipped_step"):
            yield (
                f"in {counted(skipped.trials, 'trial')} steps were skipped whose loss or gradient was not finite: "
                f"`{command(f'show {skipped.first} --study {self.name}')}` counts them"
            )
        changed = self._ledger.look(lambda connection: queries.newest_event(connection, self._id, "process_changed"))
        if changed:
            yield changed["reason"]
        undeclared = [trial for trial in self.trials.values() if trial.num_epochs is None]
        last = max((trial.epoch for trial in undeclared if trial.state == "complete"), default=0)
        if last and (stopped := sum(trial.state == "pruned" and trial.epoch >= last for trial in undeclared)):
            yield (
                f"{counted(stopped, 'trial')} stopped at epoch {last}, where complete ones end: if every trial has "
                f"{last} epochs, declare num_epochs={last} in the study, and none is stopped at its last one"
            )

    def _listen(self, fresh: Sequence[Trial]) -> None:
        """A misspelt objective or constraint is told of after an epoch, and not when the first trial fails by it.

        It may still come, since a task may measure at the end alone: so nobody is stopped by this.
        """
        bounds = [one["metric"] for one in self.spec.get("constraints", ()) if not machine_dependent(one["metric"])]
        alone = len(self.metrics) == 1 and not bounds
        self._heard = bool(self.best) or any(trial.curve for trial in fresh if alone)
        going = [trial for trial in fresh if trial.state == "running" and trial.epoch > trial.from_epoch]
        if self._heard or not going or going[0].epoch == going[0].num_epochs:
            return
        number = going[0].number
        found = self._ledger.look(lambda connection: progress_queries.closed_with(connection, self._id, number))
        shown = sorted((key for key in found if not machine_dependent(key)), key=lambda key: key.startswith("train/"))
        self._heard = bool(shown)
        if shown and (missing := [metric for metric in [*self.metrics, *bounds] if metric not in found]):
            self._untold = (
                f"trial {number} has reported an epoch without {missing[0]!r}, by which the study judges"
                f"{near(missing[0], shown) or '.'} Reported were {', '.join(shown)}. Unless it comes later, the trial "
                "will fail: name one of them in the study, or report it with the others."
            )

    def _read(self, connection: Connection) -> tuple[list[Trial], list[Any]]:
        """The trials that are new or were open, and the points of their curves that are new."""
        waiting = [number for number in self._open if self.trials[number].state == "paused"]
        going = self._open.difference(waiting)
        rows = progress_queries.fresh(connection, self._id, self._next, going, waiting, self.metrics)
        fresh = [_trial(row) for row in rows]
        begun = [trial.number for trial in fresh if trial.state != "waiting"]
        if not begun:
            return fresh, []
        after = min(self.trials[number].step if number in self.trials else -1 for number in begun)
        return fresh, list(queries.curves(connection, self._id, self.metrics[:1], begun, after=after))


def _last_epoch(identity: Mapping[str, Any]) -> float:
    """The epoch at which each trial of a study ends at last; infinity where it declares none, or searches it."""
    if "train.num_epochs" in identity.get("space", {}):
        return math.inf
    config: Mapping[str, Any] = identity.get("config", {})
    train = {path.removeprefix("train."): value for path, value in config.items() if path.startswith("train.")}
    return TrialShape(train).epochs


def _trial(row: RowMapping) -> Trial:
    parts = (row["folds"] or 1) * (row["seeds"] or 1)
    last = parts if parts > 1 else row["num_epochs"]  # what a trial's epochs are counted to
    at = (row["epoch"], last, row["objectives"] or [])
    more = {"from_epoch": row["from_epoch"], "child": row["parent"] is not None, "undecided": row["undecided"]}
    return Trial(row["number"], row["state"], *at, row["params"], row["error"], **more)
