"""Decides what a study does next if its trials pause in order.

Such a study is a sequence of steps. A step trains one trial for one segment: a new trial up to its first rung, or a
paused one up to its next rung or its end. Step s is decided from the results of the steps up to s - W, where W is the
window, and begins once these have ended. So the sequence is a function of the results alone: it does not depend on the
number of workers, on interruptions, or on whether the study is run in parts.

At each step the strategy promotes a paused trial; if it promotes none, a new trial begins while the budget has trials.
The sequence ends at the first step for which there is neither. Paused trials then keep waiting, and a larger budget
continues with that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from hpo.declaration.goal import GoalWatch
from hpo.driver.failure_streak import adopted
from hpo.driver.frontier import Actions, Frontier, Onward, Past, Sampling
from hpo.driver.rules import Rules
from hpo.driver.trial_rows import has_value, trained
from hpo.ledger.rows import ProposedTrial
from hpo.space.trial_state import TERMINAL_STATES, UNSETTLED


@dataclass
class SteppedFrontier(Frontier):
    """The frontier of a study of steps: the trial of each step, and the steps whose results the sampler knows.

    steps    the trial of each step
    known    the number of steps, from the first on, whose results the sampler knows
    rested   trials that have paused at the end of a step that is not known yet
    waiting  paused trials whose steps are all known; these may be promoted
    next_told the next free position in the sequence of tells
    """

    steps: list[int] = field(default_factory=list[int])
    known: int = 0
    rested: dict[int, ProposedTrial] = field(default_factory=dict[int, ProposedTrial])
    waiting: dict[int, ProposedTrial] = field(default_factory=dict[int, ProposedTrial])
    next_told: int = 0
    _choice: tuple[int, int | None] = (-1, None)  # a step, and the trial that it promotes
    _left: Actions = field(default_factory=Actions)  # decided by `replay` and not carried out yet

    # Rows in

    @classmethod
    def replay(cls, rules: Rules, past: Past, sampling: Sampling) -> SteppedFrontier:
        """Returns the frontier of an earlier study; it knows the results from which the last step was decided."""
        rows = {row.number: row for row in past.rows}
        steps = sequence(rows, past.thaws)
        segments = Counter(steps)
        # Another strategy has let these trials continue outside the steps.
        steps += [n for n, row in rows.items() if row.state in UNSETTLED and len(past.pauses.get(n, ())) >= segments[n]]
        known = max(0, len(steps) - rules.window)
        begun, ended = Counter(steps), Counter(steps[:known])
        as_known = {n: _as_known(row, begun[n], ended[n], past.pauses.get(n, ())) for n, row in rows.items()}
        latest = dict.fromkeys(reversed(steps[:known]))
        halted = [number for number in reversed(latest) if begun[number] == ended[number]]
        told_rows = [rows[number] for number in halted if rows[number].state in TERMINAL_STATES]
        going = {number: epochs for number, epochs in past.planned.items() if rows[number].state in UNSETTLED}
        lost = {number for number, row in rows.items() if row.outcome == "lost"}
        epochs = {number: float(trained(row)) for number, row in rows.items()} | going
        more = bool(past.planned) or rules.within_budget(len(rows) - len(lost), epochs.values())
        anew = len(rows) if past.stopped and more else None  # the newest steps may continue a trial of any number
        streak = adopted(rules.budget, past.forgiven, told_rows, None, anew)
        untold = rows.keys() - {row.number for row in told_rows}
        frontier = cls(
            rules,
            sampling(as_known, halted, streak.forgiven),
            streak,
            GoalWatch(rules.goal, rules.objectives, told_rows),
            asked=len(rows),
            told=len(told_rows),
            open=set(untold),
            ended={number: rows[number] for number in untold if rows[number].state in TERMINAL_STATES},
            epochs=epochs,
            planned=dict(past.planned),
            lost=lost,
            scored=any(map(has_value, past.rows)),
            expired=rules.budget.seconds is not None and past.seconds >= rules.budget.seconds,
            paused={number for number, row in rows.items() if row.state == "paused"},
            steps=steps,
            known=known,
            next_told=1 + max((row.told for row in past.rows if row.told is not None), default=-1),
        )
        for number in frontier.paused:
            kept = frontier.waiting if begun[number] == ended[number] else frontier.rested
            kept[number] = rows[number]
        frontier._left = frontier.next(ask=False)
        frontier.done = frontier.done and not frontier._left.tell
        return frontier

    def observe(self, halted: Iterable[ProposedTrial], paused: Set[int]) -> None:
        """Takes in the trials that have ended or paused since the last call; `paused` are all paused trials."""
        rows = [row for row in halted if row.number in self.open]  # without the trials that `replay` has learned
        super().observe([row for row in rows if row.state != "paused"], paused)
        for row in rows:
            if row.state == "paused":
                self.rested[row.number], self.epochs[row.number] = row, trained(row)

    # Actions out

    def next(self, *, ask: bool = True) -> Actions:
        """Returns the actions to take now, and counts them as done. Without `ask` it tells ends and begins nothing."""
        actions, self._left = self._left, Actions()
        self.streak = self.streak.ahead(self.open - self.paused, self.ended)
        while (number := self._due(actions)) is not None and ask and not self.expired:
            self._begin(number, actions)
        over = number is None and not self._under_way
        if self.streak.full or over:
            for index in range(self.known, len(self.steps)):
                if self._has_ended(self.steps[index]):
                    self._learn_step(self.steps[index], actions)
            self.known = len(self.steps) if over else self.known
        self.done = actions.done = self.streak.full or over
        return actions

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to train: the study is done, or its time is used up before its steps."""
        return self.done or self.expired

    def _due(self, actions: Actions) -> int | None:
        """Returns the trial of the next step; None if its decisive results are unknown or nothing is left to train.

        Another step may follow while segments are running: a trial counts with all its epochs until it has paused, and
        a lost trial is replaced.
        """
        if self.known > (needed := len(self.steps) - self.rules.window + 1) and self.known:
            return None  # the sequence has ended
        while self.known < needed:
            if not self._has_ended(self.steps[self.known]):
                return None
            self._learn_step(self.steps[self.known], actions)
            self.known += 1
        over = self.streak.full or self.goal.reached or not self._epochs_left
        promoted = None if over else self._promoted()
        return self.asked if promoted is None and self.wants_more else promoted

    def _promoted(self) -> int | None:
        if self._choice[0] != len(self.steps):
            assert self.rules.promotion is not None
            numbers = self.rules.promotion.promote(self.proposer.rungs(), False) if self.waiting else ()
            self._choice = len(self.steps), next(iter(numbers), None)
        return self._choice[1]

    def _begin(self, number: int, actions: Actions) -> None:
        if number == self.asked:
            actions.ask.append(self.ask())
        else:
            actions.onward.append(Onward(number, self.waiting.pop(number).fence, self.asked))
            self.paused = self.paused - {number}
            self.epochs[number] = self.planned[number]
            self.proposer.resume([number])
        self.steps.append(number)

    def _has_ended(self, number: int) -> bool:
        return number in self.ended or number in self.rested

    @property
    def _under_way(self) -> bool:
        """Returns whether a step has not ended yet."""
        return not all(map(self._has_ended, self.steps[self.known :]))

    def _learn_step(self, number: int, actions: Actions) -> None:
        if number in self.rested:
            row = self.waiting[number] = self.rested.pop(number)
            self.proposer.tell(row)
            return
        row = self.ended.pop(number)
        if row.told is None:  # else an earlier driver told it when the study ended
            actions.tell.append((number, self.next_told))
            self.next_told += 1
        self._learn(row)


def sequence(rows: Mapping[int, ProposedTrial], thaws: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the trial of each step; `thaws` are the continued trials, each with the count of trials asked before."""
    after = dict[int, list[int]]()
    for number, before in thaws:
        after.setdefault(before, []).append(number)
    steps = after.get(0, [])
    for number in range(len(rows)):
        steps += [number, *after.get(number + 1, ())]
    return steps


def _as_known(row: ProposedTrial, begun: int, ended: int, pauses: Sequence[int]) -> ProposedTrial:
    """Returns a trial's row at the time when `ended` of its `begun` segments were known."""
    if begun == ended:
        return row
    return replace(row, state="running", epoch=pauses[ended - 1] if ended else 0)
