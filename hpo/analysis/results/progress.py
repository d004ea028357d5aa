"""Reads the progress of a running study from the ledger: ended trials, the state of the others, and the speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hpo.analysis.results import stopped
from hpo.clock import Clock
from hpo.declaration.goal import Goal
from hpo.ledger import Ledger, answer, queries
from hpo.ledger.continuing import continuing
from hpo.ledger.finished import Finished
from hpo.ledger.names import machine_dependent
from hpo.ledger.rows import Connection, ProgressRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import progress as progress_queries
from hpo.search.ranking import best_of
from hpo.search.strategies.registry import make_strategy
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES, UNSETTLED
from hpo.text import command, counted, near, spelled

ALIKE = 5  # complete trials, after which equal values in all of them are reported
# Events that are reported by their reason alone.
_REASONS = ("unsaved_attributes", "compiled_shapes", "compiled_again", "compiled_without_graphs", "graphs_skipped")


@dataclass
class Trial:
    """A trial as shown to the user. `curve` holds the first objective's values so far, `values` its final ones."""

    number: int
    state: str
    epoch: int
    num_epochs: int | None
    values: list[float | None]
    params: dict[str, Any]
    error: str | None
    curve: list[float] = field(default_factory=list)
    step: int = -1  # the last step of the curve that has been read
    from_epoch: int = 0
    child: bool = False  # it continues from another trial's checkpoint
    judged: queries.Judged | None = None  # for the best trials: the epoch, and its other metrics
    removed: bool = False
    undecided: bool = False  # its last report closed an epoch with all objectives, and has no verdict
    finished: Finished | None = None  # for the best trials: the training that took a stopped trial to its end

    @property
    def why(self) -> str:
        """Returns why it failed or is infeasible, in a line."""
        return self.error.splitlines()[0] if self.error and self.state in ("failed", "infeasible") else ""

    @property
    def shown(self) -> list[float | None]:
        """Returns its values by objective; until it has ended, the newest value of the first objective."""
        return self.values if None not in self.values and self.values else [*self.curve[-1:]]


class Progress:
    """The progress of a study in the ledger. `refresh` updates it and returns the trials that have ended since.

    Terminal trials never change, so only new and open trials are read, and only new points of curves.
    """

    def __init__(self, ledger: Ledger, name: str, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self.name = name
        self.trials: dict[int, Trial] = {}
        self.states: Counter[str] = Counter()  # updated with the trials, because counting many trials each time is slow
        self.epochs = 0
        self.replaced = 0  # trials that another one continued, as Ray Tune's population-based training does
        self._open: set[int] = set()
        self._next = 0  # the lowest number above all so far
        self._compared = False  # whether the first complete trials were compared
        self._heard, self._untold = False, ""  # whether a trial's first epoch was checked for the objectives
        self.best: list[Trial] = []  # the best trial or, with several objectives, the Pareto front
        row = ledger.look(lambda connection: queries.study_row(connection, name))
        self._id: int = row.id
        self.requested: int | None = row.requested or None
        self.max_epochs: int | None = row.max_epochs
        self.max_seconds: float | None = row.max_seconds
        self.goal = Goal.of(row.environment)
        self.spec = row.spec
        self.last_epoch = _last_epoch(row.identity)
        self._strategy = make_strategy(self.spec.strategy)
        self.data = row.environment.get("data", {})
        self.tracking_uri: str = row.environment["tracking_uri"]
        self.refresh()
        self.begin()

    def begin(self) -> None:
        """Starts the time span over which rates are computed: when the study's driver began, else now."""
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
        return [objective["metric"] for objective in self.spec.objectives]

    @property
    def ended(self) -> int:
        """Returns how many of the requested trials have ended; a trial that another one continued does not count."""
        return sum(self.states[state] for state in TERMINAL_STATES) - self.replaced

    @property
    def paused(self) -> int:
        return self.states["paused"]

    @property
    def begins(self) -> bool:
        """Returns whether nothing has been trained since the study's driver, or else this process, began."""
        return (self.ended + self.paused, self.epochs) == (self._halted_before, self._epochs_before)

    @property
    def starts(self) -> bool:
        """Returns whether the study has a driver under which nothing has been trained yet."""
        return self._driven and self.begins

    @property
    def saves(self) -> bool:
        """Returns whether a trial has ever saved a checkpoint."""
        return self._ledger.look(lambda connection: driver_queries.any_saved(connection, self._id))

    @property
    def continuing(self) -> str:
        """Returns the command that continues the study."""
        return self._ledger.look(lambda connection: continuing(connection, queries.study_row(connection, self.name)))

    @property
    def keeps_best(self) -> bool:
        """Returns whether one of the best trials has a checkpoint."""
        ends = [trial.finished for trial in self.best]
        sources = [(end.study_id, end.number) for end in ends if end is not None and end.trained_in]
        sources += [(self._id, trial.number) for trial in self.best]
        return self._ledger.look(lambda connection: any(driver_queries.any_saved(connection, *at) for at in sources))

    @property
    def at_rung(self) -> set[int]:
        """Returns the numbers of the trials that wait at a rung.

        In ordered mode they wait until all earlier trials have reached it or ended.
        """
        waiting, behind = set[int](), math.inf
        if self.spec.order != "ordered":
            return waiting
        for trial in (self.trials[number] for number in sorted(self._open)):
            if behind < trial.epoch and self._asks(trial):
                waiting.add(trial.number)
            if trial.state in UNSETTLED:
                behind = min(behind, trial.epoch)
        return waiting

    def _asks(self, trial: Trial) -> bool:
        """Returns whether the strategy has yet to answer the trial's last report."""
        return trial.undecided and trial.epoch != trial.num_epochs and self._strategy.wants(trial.epoch)

    @property
    def elapsed(self) -> float:
        return self._clock.monotonic() - self._began

    def rates(self) -> tuple[float, float]:
        """Returns trials per minute that ended or paused, and epochs per second, since `begin`."""
        elapsed, halted = max(self.elapsed, 1e-9), self.ended + self.paused
        return 60 * (halted - self._halted_before) / elapsed, (self.epochs - self._epochs_before) / elapsed

    def eta(self) -> float | None:
        """Returns the estimated seconds left at the speed so far, by trials or by epochs; None until a trial has
        ended."""
        per_minute, per_second = self.rates()
        if not per_minute:
            return None
        left = [] if self.requested is None else [60 * max(self.requested - self.ended - self.paused, 0) / per_minute]
        if self.max_epochs is not None and per_second:
            left.append(max(self.max_epochs - self.epochs, 0) / per_second)
        return min(left, default=None)

    def counts(self, *, noun: bool = False) -> str:
        """Returns the ended share of the budget, such as `3/50 trials, 9 paused` or `3 trials, 40/200 epochs`.

        Without `noun` it is `3/50`.
        """
        text = f"{self.ended}/{self.requested}" if self.requested else str(self.ended)
        if noun:
            text += " trial" if (self.requested or self.ended) == 1 else " trials"
        text += f", {self.paused} paused" if self.paused else ""
        return text + (f", {self.epochs}/{self.max_epochs} epochs" if self.max_epochs else "")

    def asked_for(self) -> str:
        """Returns the budget, such as `50 trials or 200 epochs or 2h`; the bound reached first ends the study."""
        bounds = [
            counted(self.requested, "trial") if self.requested else "",
            counted(self.max_epochs, "epoch") if self.max_epochs else "",
        ]
        bounds += [spelled(self.max_seconds) if self.max_seconds else "", *self.goal.bounds()]
        return " or ".join(filter(None, bounds))

    def refresh(self) -> list[Trial]:
        """Reads what is new; returns the trials that have ended or paused since."""
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
        scored = [
            trial
            for trial in fresh
            if trial.state == "complete" and trial.values and None not in trial.values and not trial.removed
        ]
        if scored and not self.spec.listed:  # listed configurations have no best
            values: dict[int, Any] = {trial.number: trial.values for trial in (*self.best, *scored)}
            self.best = [self.trials[number] for number in best_of(self.spec.objectives, values)]
            self._look_at([trial for trial in self.best if trial.judged is None])
        if not self._heard:
            self._listen(fresh)
        if not self._compared and self.states["complete"] >= ALIKE:
            self._compare()
        return [trial for trial in fresh if trial.state in TERMINAL_STATES or trial.number in paused]

    def conclude(self) -> list[str]:
        """Replaces `best` by the study's final answer if other seeds or later training decide it.

        Returns lines that explain the answer.
        """
        bests = self._ledger.look(lambda connection: answer.bests(connection, queries.study_row(connection, self.name)))
        if all(best.seeds is None and best.finished is None for best in bests):
            return []
        self.best = [self._ended(best) for best in bests]
        self._look_at([trial for trial in self.best if trial.judged is None])
        lines = [bests[0].finished.described()] if bests[0].finished else []
        if seeds := bests[0].seeds:
            lines += seeds.with_command(self.name, bests[0].number)
        return [line for line in lines if line] if len(bests) == 1 else []

    def _ended(self, best: answer.Best) -> Trial:
        """Returns a best trial with its latest training."""
        trial, end = self.trials[best.number], best.finished
        if end is None:
            return trial
        epoch = trial.epoch if end.before else end.epoch
        return replace(trial, values=[*best.values.values()], epoch=epoch, judged=None, finished=end)

    def _look_at(self, found: Sequence[Trial]) -> None:
        """Reads the epochs by which trials were judged."""
        numbers = [trial.number for trial in found]

        def look(connection: Connection, name: str, of: Sequence[int]) -> dict[int, queries.Judged]:
            study = queries.study_row(connection, name)
            rows = queries.numbered(connection, study.id, of)
            judged = queries.judged(connection, study, rows)
            return {row.number: judged[row.id] for row in rows if row.id in judged}

        judged = self._ledger.look(lambda connection: look(connection, self.name, numbers))
        for trial in found:
            trial.judged = judged.get(trial.number)
            if trial.finished and (trained_in := trial.finished.trained_in):
                study, number = trained_in
                trial.judged = self._ledger.look(partial(look, name=study, of=[number])).get(number)

    def untold(self) -> str:
        """Returns the pending notice for the user and clears it; empty if there is none."""
        text, self._untold = self._untold, ""
        return text

    def stopped_ahead(self) -> str:
        """Returns a sentence about stopped trials that were better than the answer; empty if there are none."""

        def read(connection: Connection) -> str:
            return stopped.line(stopped.stopped_ahead(connection, queries.study_row(connection, self.name)), self.name)

        return self._ledger.look(read)

    def remarks(self) -> Iterator[str]:
        """Yields remarks about trials that continued despite a problem."""
        kinds = ("warmup_not_over", "unread_options", "gpu_not_measured", "skipped_step", *_REASONS)
        events = self._ledger.look(lambda connection: progress_queries.befell(connection, self._id, kinds))
        if cold := events.get("warmup_not_over"):
            yield (
                f"in {counted(cold.trials, 'trial')} the warmup was longer than the run, so train.optim.lr was never "
                "reached: shorten train.schedule.warmup_*, or train for longer"
            )
        if unread := events.get("unread_options"):
            why = (unread.reason or "").rstrip(".")
            yield f"in {counted(unread.trials, 'trial')} not all was read of what is set: {why}"
        if unmeasured := events.get("gpu_not_measured"):
            yield unmeasured.reason or ""
        for befallen in (events[kind] for kind in _REASONS if kind in events):
            yield f"in {counted(befallen.trials, 'trial')} {(befallen.reason or '').rstrip('.')}"
        if skipped := events.get("skipped_step"):
            yield (
                f"in {counted(skipped.trials, 'trial')} steps were skipped whose loss or gradient was not finite: "
                f"`{command(f'show {skipped.first} --study {self.name}')}` counts them"
            )
        changed = self._ledger.look(lambda connection: queries.newest_event(connection, self._id, "process_changed"))
        if changed:
            yield changed["reason"]
        undeclared = [(trial.state, trial.epoch) for trial in self.trials.values() if trial.num_epochs is None]
        if late := stopped.at_the_end(undeclared):
            yield ": ".join(late)

    def _listen(self, fresh: Sequence[Trial]) -> None:
        """Reports a misspelt objective or constraint after the first epoch, before the first trial fails by it.

        A task may measure only at its end, so this stops no trial.
        """
        bounds = [row["metric"] for row in self.spec.constraints if not machine_dependent(row["metric"])]
        any_metric = len(self.metrics) == 1 and not bounds
        self._heard = bool(self.best) or any(trial.curve for trial in fresh if any_metric)
        going = [trial for trial in fresh if trial.state == "running" and trial.epoch > trial.from_epoch]
        if self._heard or not going or going[0].epoch == going[0].num_epochs:
            return
        number = going[0].number
        reported = self._ledger.look(lambda connection: progress_queries.closed_with(connection, self._id, number))
        names = [key for key in reported if not machine_dependent(key)]
        shown = sorted(names, key=lambda key: key.startswith("train/"))
        self._heard = bool(shown)
        if shown and (missing := [metric for metric in [*self.metrics, *bounds] if metric not in reported]):
            self._untold = (
                f"trial {number} has reported an epoch without {missing[0]!r}, by which the study judges"
                f"{near(missing[0], shown) or '.'} Reported were {', '.join(shown)}. Unless it comes later, the trial "
                "will fail: name one of them in the study, or report it with the others."
            )

    def _compare(self) -> None:
        """Reports once that the first complete trials have one value although their parameters differ.

        A dimension may then have no effect on the training.
        """
        self._compared = True
        complete = [trial for trial in self.trials.values() if trial.state == "complete"]
        values = [value for value in complete[0].values if value is not None]
        alike = len(values) == len(self.metrics) and all(trial.values == values for trial in complete)
        if not alike or self.spec.listed or all(trial.params == complete[0].params for trial in complete):
            return
        named = ", ".join(f"{metric} {value:.6g}" for metric, value in zip(self.metrics, values, strict=True))
        paths = ", ".join(dict.fromkeys(path for trial in complete for path in trial.params))
        notice = (
            f"the first {len(complete)} complete trials all have {named}, whatever their parameters: see that what is "
            f"trained reads {paths}."
        )
        self._untold = " ".join(filter(None, [self._untold, notice]))

    def _read(self, connection: Connection) -> tuple[list[Trial], list[Any]]:
        """Returns the trials that are new or were open, and the new points of their curves."""
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
    """Returns the epoch at which each trial ends at the latest; infinity if it is searched or not declared."""
    if "train.num_epochs" in identity.get("space", {}):
        return math.inf
    config: Mapping[str, Any] = identity.get("config", {})
    train = {path.removeprefix("train."): value for path, value in config.items() if path.startswith("train.")}
    return TrialShape(train).epochs


def _trial(row: ProgressRow) -> Trial:
    parts = (row.folds or 1) * (row.seeds or 1)
    last = parts if parts > 1 else row.num_epochs  # the end of a trial's epochs
    values: list[float | None] = [*(row.objectives or ())]
    at = (row.epoch, last, values)
    child, begun = row.parent is not None, row.from_epoch
    more = {"from_epoch": begun, "child": child, "undecided": row.undecided, "removed": row.removed}
    return Trial(row.number, row.state, *at, row.params, row.error, **more)
