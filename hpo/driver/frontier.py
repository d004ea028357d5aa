"""Decides what a study does next: which trials to ask for, when the sampler learns how a trial ended, which paused
trials train on, and when the study is done.

A Frontier is a value in memory. A driver builds it from the ledger's rows (`replay`), shows it the trials that have
halted since (`observe`), and carries out what it returns (`next`):

    frontier = Frontier.replay(rules, past, sampling)
    while not frontier.done:
        frontier.observe(halted, paused)    # rows in
        actions = frontier.next()           # actions out

It reads no ledger and no clock, so equal rows give equal actions after any interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpo.declaration.goal import GoalWatch
from hpo.driver.failure_streak import FailureStreak, adopted
from hpo.driver.rules import Rules
from hpo.driver.trial_rows import has_value, trained
from hpo.ledger.rows import ProposedTrial
from hpo.search.population.base import planned_epochs
from hpo.search.promotion.base import RungView
from hpo.space.trial_state import TERMINAL_STATES

if TYPE_CHECKING:
    from hpo.ledger.transactions import Ask


class Proposer(Protocol):
    """The sampler, as a frontier uses it."""

    def exhausted(self, number: int) -> str:
        """Returns the reason why nothing is left to try as trial `number`; empty if something is."""
        ...

    def ask(self, number: int, told: int) -> Ask:
        """Returns trial `number`, proposed after `told` ends."""
        ...

    def tell(self, row: ProposedTrial) -> None:
        """Learns from a trial that has ended or waits at a rung."""
        ...

    def adopt(self, row: ProposedTrial) -> None:
        """Counts a trial that this sampler has not proposed as open."""
        ...

    def resume(self, numbers: Sequence[int]) -> None:
        """Counts these paused trials as open again."""
        ...

    def rungs(self) -> RungView:
        """Returns the curves and states by which a strategy promotes trials."""
        ...


@dataclass(frozen=True)
class Past:
    """The ledger's data of a study when a driver begins.

    rows      every trial, by number
    planned   number -> epochs that an open trial will have trained at its end
    forgiven  number of the first trial whose failure counts
    seconds   time for which the study has been driven
    stopped   whether the last driver left the study as stopped
    pauses    number -> the epochs at which a trial has paused, ascending; only for ordered pausing
    thaws     (trial, count of trials asked before it continued), in order; only for ordered pausing
    """

    rows: Sequence[ProposedTrial] = ()
    planned: Mapping[int, float] = field(default_factory=dict[int, float])
    forgiven: int = 0
    seconds: float = 0.0
    stopped: bool = False
    pauses: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    thaws: Sequence[tuple[int, int]] = ()


# Makes the sampler of a study whose trials are `rows` and of which it knows these ends, in this order; configurations
# that failed before trial `forgiven` count as untried.
Sampling = Callable[[Mapping[int, ProposedTrial], Sequence[int], int], Proposer]


class Onward(NamedTuple):
    """A paused trial that continues in order, the fence of its last attempt, and the count of trials asked before."""

    number: int
    fence: int
    asked: int


@dataclass
class Actions:
    """Lists what a driver carries out. After `retire` it observes again, since those trials have ended then.

    thaw    paused trials that train on
    onward  paused trials that train on as a step of the study, which the ledger keeps
    tell    (trial, place in the sequence of tells) of ends that the sampler has learned
    ask     new trials, each proposed after the tells before it
    retire  paused trials that end as pruned, by the value of their rung
    done    whether the study has ended
    """

    thaw: list[int] = field(default_factory=list[int])
    onward: list[Onward] = field(default_factory=list[Onward])
    tell: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    ask: list[Ask] = field(default_factory=list["Ask"])
    retire: list[int] = field(default_factory=list[int])
    done: bool = False


@dataclass
class Frontier:
    """Tracks each trial of a study as open or told, and which open trials have ended or are paused.

    asked, told  numbers of trials that were asked for, and of ends that the sampler knows
    open         trials whose end the sampler does not know
    ended        rows of open trials that have ended
    paused       trials that wait at a rung
    epochs       number -> epochs that a trial has trained, or will have at its end
    planned      number -> epochs of a trial that trains to its end
    lost         trials that were lost to the infrastructure, which the budget does not count
    scored       whether a trial has a value
    expired      whether the time is used up
    done         whether nothing is left to be trained or told
    """

    rules: Rules
    proposer: Proposer
    streak: FailureStreak
    goal: GoalWatch
    asked: int
    told: int
    open: set[int]
    ended: dict[int, ProposedTrial]
    epochs: dict[int, float]
    planned: dict[int, float]
    lost: set[int]
    scored: bool
    expired: bool
    done: bool = False
    paused: Set[int] = frozenset()
    _rested: list[ProposedTrial] = field(
        default_factory=list[ProposedTrial]
    )  # paused, and the sampler does not know it yet
    _judged: bool | None = None  # the `last` by which the paused trials were judged; None after any change

    # Rows in

    @classmethod
    def replay(cls, rules: Rules, past: Past, sampling: Sampling) -> Frontier:
        """Returns the frontier of an earlier study, from its rows."""
        rows = {row.number: row for row in past.rows}
        ended = {number: row for number, row in rows.items() if row.state in TERMINAL_STATES}
        by_position = {row.told: row for row in past.rows if row.told is not None}
        in_order = [by_position[position] for position in sorted(by_position)]
        known = [row.number for row in in_order]
        all_told = len(known) == len(rows) and not past.planned
        if rules.order == "ordered":  # as the last ask saw them, whatever was told after it
            known = [number for number in range(rules.known_to(len(rows) - 1)) if number in ended]
        epochs = {**{number: trained(row) for number, row in rows.items()}, **past.planned}
        lost = {number for number, row in rows.items() if row.outcome == "lost"}
        short = rules.within_budget(len(rows) - len(lost), epochs.values())
        # Where nothing more is asked for, the study is judged by all that was told.
        seen = [rows[number] for number in known]
        anew = min(past.planned, default=len(rows)) if past.stopped and (short or past.planned) else None
        streak = adopted(rules.budget, past.forgiven, seen, None if short else in_order, anew)
        goal = GoalWatch(rules.goal, rules.objectives, seen if short else in_order)
        if short and rules.order == "ordered":
            due = range(rules.known_to(len(rows)))
            if all(number in ended for number in due):
                goal = goal.ahead(rows[number] for number in sorted({*due}.difference(known)))
        unknown = rows.keys() - known
        frontier = cls(
            rules,
            sampling(rows, known, streak.forgiven),
            streak,
            goal,
            asked=len(rows),
            told=len(known),
            open=set(unknown),
            ended={number: ended[number] for number in ended.keys() & unknown},
            epochs=epochs,
            planned=dict(past.planned),
            lost=lost,
            scored=any(map(has_value, past.rows)),
            expired=rules.budget.seconds is not None and past.seconds >= rules.budget.seconds,
        )
        frontier.done = all_told and not frontier.wants_more
        return frontier

    def observe(self, halted: Iterable[ProposedTrial], paused: Set[int]) -> None:
        """Records the trials that have ended or paused since the last call; `paused` are all paused trials."""
        self.paused = paused
        for row in halted:
            number, self._judged = row.number, None
            if row.state != "paused":
                self.ended[number], self.epochs[number] = row, trained(row)
                self.scored = self.scored or has_value(row)
                self.lost |= {number} if row.outcome == "lost" else set()
            elif self.rules.promotion:  # it trains no further epochs unless it is promoted
                self.epochs[number] = row.epoch
                self._rested.append(row)

    def follow(self, asked: Iterable[ProposedTrial], told: Iterable[ProposedTrial]) -> None:
        """Records another process's decisions: the trials that it asked for, and ends in the order of tells."""
        for row in asked:
            self.open.add(row.number)
            self.asked += 1
            if row.told is None:
                self.proposer.adopt(row)
        for row in told:
            self._learn(row)

    def look_again(self) -> None:
        """Makes `next` judge paused trials again, since a trial that still trains may have passed a rung."""
        self._judged = None

    # Actions out

    def next(self, *, ask: bool = True) -> Actions:
        """Returns the actions to take now, and counts them as done. Without `ask` it tells ends and begins nothing."""
        if self.rules.population and self.paused:  # their generation is over, and other trials continue from them
            return self._retire(self.paused)
        for row in self._rested:
            self.proposer.tell(row)
        self._rested = []
        self.streak = self.streak.ahead(self.open, self.ended)
        actions, begins = Actions(), ask and not self.expired
        if begins:
            actions.thaw = self._promote()
        while begins and self.wants_more and self._may_ask(actions):
            actions.ask.append(self.ask())
        waiting = self.paused if self.rules.promotion else frozenset[int]()
        if self.streak.full or (not self.wants_more and self.open - waiting <= self.ended.keys()):
            self._tell_ended(actions)
        if begins and actions == Actions() and self.only_paused and not (self.wants_more or self.streak.full):
            return self._retire(waiting & self.open)
        self.done = actions.done = self.streak.full or not (self.wants_more or self.open)
        return actions

    def ask(self) -> Ask:
        """Returns the next trial, which counts as asked for."""
        ask = self.proposer.ask(self.asked, self.told)
        start, population = ask.descent.get("from_epoch", 0), self.rules.population
        self.epochs[self.asked] = self.planned[self.asked] = planned_epochs(ask.config, population, self.asked, start)
        self.open.add(self.asked)
        self.asked += 1
        return ask

    @property
    def wants_more(self) -> bool:
        """Returns whether to ask for trials. It may become true again, since trials may need fewer epochs than
        planned."""
        over = self.streak.full or self.goal.reached
        return not over and self.within_budget and not self.proposer.exhausted(self.asked)

    @property
    def within_budget(self) -> bool:
        """Returns whether the budget has trials and epochs left; an open trial counts with all its planned epochs."""
        return self.rules.within_budget(self.asked - len(self.lost), self.epochs.values())

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to train: the study is done, or its time is used up before its trials."""
        return self.done or (self.expired and (bool(self.open - self.ended.keys()) or self.wants_more))

    @property
    def only_paused(self) -> bool:
        """Returns whether no trial trains or waits for a worker, and some are paused."""
        going = self.open - self.ended.keys()
        return bool(going) and going <= self.paused

    @property
    def stuck(self) -> bool:
        """Returns whether only paused trials are left and no strategy promotes them."""
        return self.only_paused and not (self.rules.promotion or self.rules.population)

    def _may_ask(self, actions: Actions) -> bool:
        """Tells the sampler the ends that the next ask requires. Returns whether the ask may be made now.

        In ordered mode these are exactly the trials before the window, all of which must have ended. In async mode they
        are all ended trials, and fewer trials than the window may be open.
        """
        if self.rules.order == "async":
            self._tell_ended(actions)
            return self.wants_more and len(self.open - self.paused) < self.rules.window
        due = sorted(number for number in self.open if number < self.rules.known_to(self.asked))
        if any(number not in self.ended for number in due):
            return False
        for number in due:
            self._tell(number, actions)
        return self.wants_more

    def _tell_ended(self, actions: Actions) -> None:
        for number in sorted(self.ended.keys() & self.open):
            self._tell(number, actions)

    def _tell(self, number: int, actions: Actions) -> None:
        actions.tell.append((number, self.told))
        self._learn(self.ended.pop(number))

    def _learn(self, row: ProposedTrial) -> None:
        self.proposer.tell(row)
        self.told += 1
        self.open.remove(row.number)
        self.streak.note(row)
        self.goal.note(row)

    def _promote(self) -> list[int]:
        """Returns the paused trials that train on, as many as there is room for; none if nothing is new."""
        strategy, last = self.rules.promotion, not self.wants_more
        room = self.rules.window - len(self.open - self.paused - self.ended.keys())
        over = self.streak.full or self.goal.reached or self._judged == last
        if over or not (strategy and self.paused and room > 0):
            return []
        self._judged, rungs = last, self.proposer.rungs()
        # One of the longest trained trials may exceed the epochs, so that the study has a best trial.
        none_complete = room == self.rules.window and "complete" not in rungs.states.values()
        near: Sequence[int] = (
            strategy.promote(rungs.furthest(), last) if none_complete and not self._epochs_left else ()
        )
        numbers: list[int] = []
        for number in (near or strategy.promote(rungs, last))[:room]:
            if self._epochs_left or (none_complete and not numbers):
                self.epochs[number] = self.planned[number]
                numbers.append(number)
        if numbers:
            self.proposer.resume(numbers)
        self.paused = self.paused - set(numbers)
        return numbers

    @property
    def _epochs_left(self) -> bool:
        return self.rules.within_epochs(self.epochs.values())

    def _retire(self, numbers: Set[int]) -> Actions:
        self.paused = self.paused - numbers  # they have ended, and are observed again
        return Actions(retire=sorted(numbers))
