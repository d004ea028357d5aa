"""The driver: adopt -> fill -> tell, one per study. It starts from the ledger, always; resuming is not a mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpo.clock import Clock, SystemClock
from hpo.declaration.budget import Budget
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver import end_reason, failure_streak
from hpo.driver.open import continued, open_study, remembered, write_changes
from hpo.driver.proposer import LedgerProposer, ListProposer
from hpo.driver.reclaim import Reclaimer
from hpo.driver.request import DriverOptions
from hpo.driver.retention import Retention
from hpo.driver.set_aside import take_over
from hpo.driver.stopwatch import Stopwatch
from hpo.ledger import Ledger, driver_queries, transactions
from hpo.ledger.changes import Changes
from hpo.ledger.history import Curves
from hpo.ledger.leases import Heartbeat, Lease, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, RowMapping
from hpo.search.population.base import breeding, planned_epochs
from hpo.search.promotion.base import RungView, promoting
from hpo.space.trial_state import TERMINAL_STATES
from hpo.workers.executors.base import Executor, WorkerContext
from trainer.runtime.failpoint import failpoint


class Driver:
    """Drives one study to the end of its budget. `request_stop` may be called from a signal handler.

    `idle` after `acquire` says that nothing is left to be trained. `reason` after `run` says why the study ended
    otherwise than complete.
    """

    def __init__(
        self,
        ledger: Ledger,
        resolved: ResolvedStudy,
        options: DriverOptions,
        executor: Executor,
        clock: Clock | None = None,
    ) -> None:
        self._ledger, self._resolved = ledger, resolved
        self._study, self._spec = resolved.study, resolved.spec
        self._promoting, self._breeding = resolved.promotion, resolved.population
        self._options, self._executor = options, executor
        self._clock = clock or SystemClock()
        self._stopping = False
        self._time = Stopwatch(self._clock)
        self.reason = ""

    def acquire(self) -> None:
        """Become the study's driver; raise Busy if another one lives."""
        row = open_study(self._ledger, self._resolved, self._options, anew=True)
        self._id, name = row["id"], f"driver:{row['id']}"
        me, timeout = Process.current(), self._options.lease_timeout
        self._lease: Lease = acquire(self._ledger, name, self._spec.name, me, self._clock, timeout)
        self._changes = Changes(self._ledger)
        # From a thread of its own, since inline trials train in this one.
        period = min(1.0, self._options.lease_timeout / 3)
        self._heartbeat = Heartbeat(f"study {self._spec.name}", lambda: self._ledger.transact(self._renew), period)
        try:
            self._take_over()
        except BaseException:
            self.release()
            raise

    def _take_over(self) -> None:
        """As the study's only driver: rebuild what memory holds, and note what the user wants now."""
        row = take_over(self._ledger, self._resolved, self._options, self._lease, self._clock)
        self._state = row["state"]
        self._time = Stopwatch(self._clock, row["seconds_used"])
        self._budget = self._options.budget.over(stored := Budget.of(dict(row)))
        judged, options = (self._study.objectives, self._study.constraints), self._options
        self._curves = Curves(self._id, *judged, bounded=self._resolved.bounded)
        self._reclaimer = Reclaimer(self._ledger, self._id, self._clock, options.lease_timeout, self._executor.codes)
        self._adopt()
        self._retention = Retention(self._ledger, self._spec.name, self._options, self._lease)
        self._options.budget.check(self._spec.name, stored, self._used)
        values = self._budget.columns()
        values |= remembered(row, options) if self.idle else continued(row, self._resolved, options)
        self._state = values.get("state", self._state)

        def body(connection: Connection) -> None:
            write_changes(connection, row, self._lease, values)
            before = row["spec"]["strategy"]
            waited = promoting(before) or breeding(before)
            if not (waited and (self._promoting or self._breeding)):  # what Ray Tune has paused waits for nothing here
                paused = [number for number, one in self._rows.items() if one["state"] == "paused"]
                driver_queries.thaw(connection, self._id, paused)
            if self._streak.forgiven > self._forgiven_before:
                uid = f"{self._lease.name}.{self._lease.fence}.forgiven"
                transactions.note(connection, self._id, failure_streak.FORGIVEN, {"first": self._streak.forgiven}, uid)

        self._lease.write(body)

    @property
    def _used(self) -> Budget:
        """How much of the budget is gone."""
        return Budget(self._asked - len(self._lost), self._epochs_ended, self._time.seconds)

    def run(self, on_tick: Callable[[], None] = lambda: None) -> str:
        """Ask and tell until all is done; the state the study is left in: complete, stopped or interrupted."""
        if self.idle or self._fill(ask=False):
            return self._end()
        at = self._options.storage, self._options.home
        self._executor.start(WorkerContext(*at, self._id, self._spec.name, self._study, self._options.prepared))
        self._time.start()
        alarm = self._time.alarm(self._budget.seconds, self._expire)
        try:
            self._drive(on_tick)
        finally:
            alarm.cancel()
            self._executor.stop(grace=self._options.lease_timeout)
            self._reclaimer.reclaim(counted=False)  # what a worker held that died or did not leave in time
        self._ledger.transact(self._renew)
        self._time.stop()
        self._fill(ask=False)  # a trial may have ended while the workers were leaving
        return self._end()

    def _drive(self, on_tick: Callable[[], None]) -> None:
        next_look, due = self._clock.monotonic(), True
        while not (self._stopping or ((due or self._changes()) and self._fill()) or self._expired or self._stuck):
            self._heartbeat.check()
            if due := self._clock.monotonic() >= next_look:
                self._reclaimer.reclaim()
                next_look = self._clock.monotonic() + min(1.0, self._options.lease_timeout / 3)
                self._looked = None  # a trial that trains may have passed a rung, so that another may go on
            self._retention.keep()
            if not self._executor.step():
                self._clock.sleep(self._changes.pause)
            on_tick()
        on_tick()  # shows the last ends, or that it stops: workers take a while to leave

    def _renew(self, connection: Connection) -> None:
        """Renew the lease and, while the study is driven, count the time so far."""
        self._lease.check(connection)
        if self._time.runs:
            driver_queries.count_time(connection, self._id, self._time.seconds)

    def _expire(self) -> None:
        self._expired = True
        self._executor.preempt()

    def all_ended(self) -> bool:
        """Whether nothing is left to be trained, by a look at the ledger, which no signal handler may take."""
        return self._fill(ask=False)

    def request_stop(self) -> None:
        """Stop gracefully: workers checkpoint and leave, trials wait for the next resume."""
        self._stopping = True
        self._executor.preempt()

    def kill(self) -> None:
        """End the workers at once."""
        self._executor.kill()

    def release(self) -> None:
        """Let another process drive the study."""
        self._heartbeat.close()
        self._changes.close()
        self._lease.release()

    # adopt

    def _adopt(self) -> None:
        """Take back what dead workers of an earlier driver hold, and rebuild from the ledger what memory held."""
        self._reclaimer.reclaim(counted=False)
        rows, plans, self._forgiven_before = self._ledger.look(self._known)
        self._asked, self._plans = len(rows), plans
        self._lost = {row["number"] for row in rows if row["outcome"] == "lost"}
        self._epochs = {row["number"]: driver_queries.trained(row) for row in rows} | plans
        self._epochs_ended = sum(map(driver_queries.trained, rows))
        self._scored = any(map(end_reason.has_value, rows))
        seconds = self._budget.seconds
        self._expired = seconds is not None and self._time.seconds >= seconds
        ended = {row["number"] for row in rows if row["state"] in TERMINAL_STATES}
        in_order = sorted((row for row in rows if row["told"] is not None), key=lambda row: row["told"])
        told = [row["number"] for row in in_order]
        self._done = len(told) == len(rows) and not plans
        if self._spec.order == "ordered":  # what the last ask saw, whatever was told after it
            due = range(self._known_to(self._asked - 1))
            told = [number for number in due if number in ended]  # all, unless the window has changed
        self._rows = {row["number"]: row for row in rows}
        self._judge_failures(in_order, told)
        at = self._ledger, self._resolved, self._curves
        asking = LedgerProposer(*at, self._rows, told, self._streak.forgiven)
        self._asking = ListProposer(self._resolved) if self._spec.listed else asking
        self._told = len(told)
        self._open = self._rows.keys() - set(told)
        self._ended_rows = {number: self._rows[number] for number in ended & self._open}
        self._paused: set[int] = set()
        self._looked: bool | None = None  # how the paused ones were last looked at; None once a trial has halted since
        more = bool(plans) or self._wants_more()
        self._done = self._done and not more
        self.idle = self._done or (self._expired and more)  # else it is to be told of the last ends

    def _known(self, connection: Connection) -> tuple[Sequence[RowMapping], dict[int, float], int]:
        """All trials, the epochs planned for those that are open, and from which trial on failures count."""
        found = driver_queries.all_rows(connection, self._id)
        plans = driver_queries.open_configs(connection, self._id).items()
        planned = {n: planned_epochs(config, self._breeding, n, found[n]["from_epoch"]) for n, config in plans}
        return found, planned, failure_streak.forgiven(connection, self._id)

    def _judge_failures(self, in_order: Sequence[RowMapping], told: Sequence[int]) -> None:
        """Count on where the last driver stopped; a study that failures have ended, and that may go on, begins anew."""
        budget, since = self._budget, self._forgiven_before
        so_far = failure_streak.FailureStreak(budget, since, in_order)
        self._streak = failure_streak.FailureStreak(budget, since, (self._rows[number] for number in told))
        if self._state == "stopped" and (self._short() or self._plans):
            self._streak = failure_streak.FailureStreak(budget, min(self._plans, default=self._asked))
        elif so_far.full and not self._short():
            self._streak = so_far

    # fill and tell

    def _fill(self, *, ask: bool = True) -> bool:
        """Tell what has ended, ask what may be asked, commit both; True once all has ended or failures end it."""
        ended = self._ended() if self._open else {}
        self._streak = self._streak.ahead(self._open, ended)
        told: list[tuple[int, int]] = []
        proposals: list[transactions.Ask] = []
        thawed = self._promoted() if ask and not self._expired else []
        while ask and not self._expired and self._wants_more() and self._may_ask(ended, told):
            proposals.append(self._ask(self._asked))
        waiting = self._paused if self._promoting else set()
        if self._streak.full or (not self._wants_more() and self._open - waiting <= ended.keys()):
            self._tell_all(ended, told)
        if told or proposals or thawed:
            self._commit(proposals, told, thawed)
        elif ask and not self._expired and self._only_paused and not self._wants_more() and not self._streak.full:
            self._retire(sorted(waiting & self._open))
        self._done = self._streak.full or (not self._wants_more() and not self._open)
        return self._done

    def _wants_more(self) -> bool:
        """Whether to ask. False may become True while trials are open: they may need fewer epochs than planned."""
        return not self._streak.full and self._short() and not self._asking.exhausted(self._asked)

    def _short(self) -> bool:
        """Whether trials and epochs are left in the budget, what is open counted in full."""
        trials = self._budget.trials
        return (trials is None or self._asked - len(self._lost) < trials) and self._epochs_short

    @property
    def _epochs_short(self) -> bool:
        return self._budget.epochs is None or sum(self._epochs.values()) < self._budget.epochs

    def _may_ask(self, ended: dict[int, RowMapping], told: list[tuple[int, int]]) -> bool:
        """Ordered: tell what the next ask is to know exactly before it. Async: tell what has ended, keep W open."""
        if self._spec.order == "async":
            self._tell_all(ended, told)
            return self._wants_more() and len(self._open - self._paused) < self._spec.window
        due = sorted(number for number in self._open if number < self._known_to(self._asked))
        if any(number not in ended for number in due):
            return False
        for number in due:
            self._tell(ended[number], told)
        return self._wants_more()

    def _known_to(self, number: int) -> int:
        """Ordered: ask `number` knows of the ends of the trials before this one; of a population, all generations
        before its own."""
        return self._breeding.begin(number) if self._breeding else number - self._spec.window + 1

    def _tell_all(self, ended: dict[int, RowMapping], told: list[tuple[int, int]]) -> None:
        for number in sorted(ended):
            if number in self._open:
                self._tell(ended[number], told)

    def _tell(self, row: RowMapping, told: list[tuple[int, int]]) -> None:
        self._asking.tell(row)
        told.append((row["number"], self._told))
        self._told += 1
        self._open.remove(row["number"])
        self._ended_rows.pop(row["number"], None)
        self._streak.note(row)

    def _ask(self, number: int) -> transactions.Ask:
        proposal = self._asking.ask(number, told=self._told)
        self._open.add(number)
        self._asked += 1
        start = proposal.descent.get("from_epoch", 0)
        self._epochs[number] = self._plans[number] = planned_epochs(proposal.config, self._breeding, number, start)
        return proposal

    def _commit(self, proposals: list[transactions.Ask], told: list[tuple[int, int]], thawed: list[int]) -> None:
        def body(connection: Connection) -> None:
            driver_queries.thaw(connection, self._id, thawed)
            transactions.ask(connection, self._id, proposals, told)

        failpoint("driver.before_ask_commit")
        self._lease.write(body)
        if thawed:
            failpoint("driver.after_thaw")
        if proposals:
            failpoint("driver.after_ask")
        if told:
            failpoint("driver.after_tell")

    def _ended(self) -> dict[int, RowMapping]:
        """The terminal trials the sampler does not know of, by number; only those that are new are read whole."""
        self._paused, rows = self._ledger.look(self._newly_halted)
        if self._breeding and self._paused:  # their generation is over, and another trial goes on from each
            self._retire(sorted(self._paused))
            self._paused, rows = self._ledger.look(self._newly_halted)
        for row in rows:
            self._looked = None
            (self._note_pause if row["state"] == "paused" else self._note_end)(row)
        return {number: row for number, row in self._ended_rows.items() if number in self._open}

    def _newly_halted(self, connection: Connection) -> tuple[set[int], Sequence[RowMapping]]:
        # Under promotion none but this driver lets paused trials go on.
        going = self._open - self._paused - self._ended_rows.keys() if self._promoting else None
        return driver_queries.halted(connection, self._id, min(self._open), self._paused, self._ended_rows, going)

    def _note_end(self, row: RowMapping) -> None:
        self._retention.note_end()
        self._ended_rows[row["number"]] = row
        self._epochs[row["number"]] = driver_queries.trained(row)
        self._scored |= end_reason.has_value(row)
        if row["outcome"] == "lost":
            self._lost.add(row["number"])

    # promotion

    def _note_pause(self, row: RowMapping) -> None:
        """Unless the strategy lets it go on the trial has trained what it has, and the sampler learns from that."""
        if self._promoting:
            self._epochs[row["number"]] = row["epoch"]
            self._asking.tell(row)

    def _promoted(self) -> list[int]:
        """The paused trials that are to go on, as many as there is room for; looked for where anything is new."""
        room = self._spec.window - len(self._open - self._paused - self._ended_rows.keys())
        last = not self._wants_more()
        if not (self._promoting and self._paused and self._looked != last and room > 0) or self._streak.full:
            return []
        self._looked, points, seen = last, self._asking.features(), self._curves
        self._ledger.look(lambda c: self._curves.refresh(c, None))
        found = RungView(seen.curves, seen.states, points, seen.order, seen.objectives[0].select == "best")
        # Only the one trial that has to end for the study to have a best one, of those furthest on, exceeds the epochs.
        alone = room == self._spec.window and "complete" not in found.states.values()
        near = self._promoting.promote(found.furthest(), last) if alone and not self._epochs_short else []
        numbers: list[int] = []
        for number in (near or self._promoting.promote(found, last))[:room]:
            if self._epochs_short or (alone and not numbers):
                self._epochs[number] = self._plans[number]
                numbers.append(number)
        for row in self._ledger.look(lambda c: driver_queries.rows(c, self._id, numbers)):
            self._asking.adopt(row)
        self._paused -= set(numbers)
        return numbers

    def _retire(self, numbers: list[int]) -> None:
        """Nothing is left that could let them go on: they end as pruned, by the value of the rung they have reached."""
        self._lease.write(lambda connection: driver_queries.retire(connection, self._id, numbers, self._curves))
        self._paused = self._paused - set(numbers)  # they have ended, and are looked for
        if numbers:
            failpoint("driver.after_retire")

    @property
    def _only_paused(self) -> bool:
        """Whether nothing runs or waits, but trials are paused."""
        going = self._open - self._ended_rows.keys()
        return bool(going) and going <= self._paused

    @property
    def _stuck(self) -> bool:
        """Whether only paused trials are left, and nobody lets them go on."""
        return self._only_paused and not (self._promoting or self._breeding)

    # the end

    def _end(self) -> str:
        """The state the study is left in, written unless trials wait; `reason` says what a user has to know of it."""
        self._retention.keep()  # also of an ended study, whose bound this command may have lowered
        name = self._spec.name
        if not self._done:
            if self._expired:
                self.reason = end_reason.time_used_up(name, self._budget.seconds or 0.0, self._time.seconds)
            elif self._only_paused and not self._stopping:
                self.reason = end_reason.only_paused(name, len(self._paused))
            return "interrupted"
        again = end_reason.mend(name, self._budget, self._used.trials or 0, self._epochs.values(), scored=self._scored)
        self.reason = self._streak.explain(again) if self._streak.full else ""
        if not self.reason and self._asked:
            lacking = (self._asked, self._scored, again)
            self.reason = self._ledger.look(lambda c: end_reason.without_best(c, self._id, name, *lacking))
        state = "stopped" if self.reason else "complete"
        why = "" if self.reason or not self._short() else self._asking.exhausted(self._asked)
        if why:
            self.reason = end_reason.nothing_left(self._asked, why)
        if why or state != self._state:
            self._ledger.transact(lambda c: driver_queries.end(c, self._lease, self._id, state, self._asked, why))
        return state
