"""Holds the lease of a study, and reads and writes the ledger under it for the study's driver."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hpo.clock import Clock
from hpo.declaration.budget import Budget
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver import end_reason
from hpo.driver.discarded_trials import take_over
from hpo.driver.frontier import Actions, Frontier, Past
from hpo.driver.open import continued, open_study, remembered, write_changes
from hpo.driver.proposer import make_proposer
from hpo.driver.reclaim import Reclaimer
from hpo.driver.request import DriverOptions
from hpo.driver.retention import Retention
from hpo.driver.rules import Rules
from hpo.driver.steps import SteppedFrontier
from hpo.driver.stopwatch import Stopwatch
from hpo.driver.trial_rows import trained
from hpo.errors import HpoError
from hpo.ledger import Ledger, transactions
from hpo.ledger.database.changes import Changes
from hpo.ledger.finished import num_confirmed
from hpo.ledger.history import Curves
from hpo.ledger.leases import Heartbeat, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, ProposedTrial, StudyRow
from hpo.ledger.views import driver as driver_queries
from hpo.search.population.base import breeding, planned_epochs
from hpo.search.promotion.base import promoting
from hpo.terminal import print
from hpo.workers.executors.base import Executor, WorkerContext
from trainer.runtime.failpoint import failpoint


class LeasedStudy:
    """A study that no other process drives until `release`. `frontier` decides its next actions."""

    def __init__(
        self, ledger: Ledger, resolved: ResolvedStudy, options: DriverOptions, executor: Executor, clock: Clock
    ) -> None:
        """Takes the lease, rebuilds the state in memory from the ledger, and writes the options of this run.

        Raises Busy if another driver is alive.
        """
        self.resolved, self.options = resolved, options
        self.id = open_study(ledger, resolved, options, anew=True).id
        self.time = Stopwatch(clock)
        name, process, timeout = resolved.spec.name, Process.current(), options.lease_timeout
        self.lease = acquire(ledger, f"driver:{self.id}", name, process, clock, timeout)
        self._changes = Changes(ledger)
        # Runs in its own thread, since inline trials train in this one.
        self._heartbeat = Heartbeat(f"study {name}", lambda: ledger.transact(self._renew), min(1.0, timeout / 3))
        try:
            row = take_over(ledger, resolved, options, self.lease, clock)
            self.time, self._state = Stopwatch(clock, row.seconds_used), row.state
            judged = resolved.study.objectives, resolved.study.constraints
            self.curves = Curves(self.id, *judged, bounded=resolved.bounded)
            self._reclaimer = Reclaimer(ledger, self.id, clock, timeout, executor.codes)
            confirmed = ledger.look(lambda connection: num_confirmed(connection, name))
            budget = resolved.searching(options.budget.over(Budget.of(row)), confirmed)
            rules = Rules.of(resolved, budget, options.goal)
            past = self._past()
            self.frontier = self._frontier(rules, past)
            self.frontier.expired |= self._seconds_left() <= 0
            self._retention = Retention(ledger, name, options, self.lease)
            self._begin(row, past)
            self._reconcile(row)
        except BaseException:
            self.release()
            raise

    @property
    def ledger(self) -> Ledger:
        return self.lease.ledger

    @property
    def pause(self) -> float:
        """Returns the seconds to wait between two calls of `written`."""
        return self._changes.pause

    def written(self) -> bool:
        """Returns whether the ledger may have been written since the last call."""
        return self._changes()

    # Rows in

    def replay(self) -> None:
        """Rebuilds the frontier from the ledger's rows."""
        self.frontier = self._frontier(self.frontier.rules, self._past())

    def observe(self) -> None:
        """Shows the frontier the trials that have halted since its last look; only their rows are read in full."""
        if self.frontier.open:
            paused, rows = self.ledger.look(self._halted)
            self.frontier.observe(rows, paused)
            if any(row.state != "paused" for row in rows):
                self._retention.note_end()

    def _past(self) -> Past:
        """Reclaims trials from dead workers of an earlier driver, and reads the study's past from the ledger."""
        self._reclaimer.reclaim(counted=False)
        population = self.resolved.population

        def read(connection: Connection) -> Past:
            rows = driver_queries.all_rows(connection, self.id)
            configs = driver_queries.open_configs(connection, self.id).items()
            planned = {n: planned_epochs(config, population, n, rows[n].from_epoch) for n, config in configs}
            forgiven = driver_queries.forgiven(connection, self.id)
            past = Past(rows, planned, forgiven, self.time.seconds, self._state == "stopped")
            if not self.resolved.stepped:
                return past
            pauses = driver_queries.every_pause(connection, self.id)
            return replace(past, pauses=pauses, thaws=driver_queries.thaws(connection, self.id))

        return self.ledger.look(read)

    def _frontier(self, rules: Rules, past: Past) -> Frontier:
        sampling = partial(make_proposer, self.ledger, self.resolved, self.curves)
        return (SteppedFrontier if rules.stepped else Frontier).replay(rules, past, sampling)

    def _halted(self, connection: Connection) -> tuple[set[int], Sequence[ProposedTrial]]:
        seen = self.frontier
        # Under promotion only this driver lets paused trials continue.
        going = seen.open - seen.paused - seen.ended.keys() if self.resolved.promotion else None
        return driver_queries.halted(connection, self.id, min(seen.open), seen.paused, seen.ended, going)

    # Actions out

    def commit(self, actions: Actions) -> None:
        """Writes the frontier's decisions: thaws, tells and asks in one transaction, then retirements."""

        def body(connection: Connection) -> None:
            driver_queries.thaw(connection, self.id, actions.thaw)
            for number, fence, before in actions.onward:
                transactions.go_on(connection, self.id, number, fence, before)
            transactions.ask(connection, self.id, actions.ask, actions.tell)

        if actions.thaw or actions.onward or actions.tell or actions.ask:
            failpoint("driver.before_ask_commit")
            self.lease.write(body)
        if actions.thaw or actions.onward:
            failpoint("driver.after_thaw")
        if actions.ask:
            failpoint("driver.after_ask")
        if actions.tell:
            failpoint("driver.after_tell")
        if actions.retire:
            self.lease.write(lambda connection: driver_queries.retire(connection, self.id, actions.retire, self.curves))
            failpoint("driver.after_retire")

    def conclude(self) -> bool:
        """Tells the sampler of all remaining ends and begins no trial. Returns whether the study is done."""
        while True:
            self.observe()
            actions = self.frontier.next(ask=False)
            self.commit(actions)
            if not actions.retire:
                return actions.done

    def end(self, *, stopping: bool) -> tuple[str, str]:
        """Returns the study's final state and a reason to show the user, and writes a new state unless trials wait."""
        self._retention.keep()  # also for an ended study, whose bound this command may have lowered
        frontier, budget, name = self.frontier, self.frontier.rules.budget, self.resolved.spec.name
        if not frontier.done and frontier.expired:
            return "interrupted", end_reason.time_used_up(name, budget.seconds or 0.0, self.time.seconds)
        if not frontier.done:
            waits = frontier.only_paused and not stopping
            return "interrupted", end_reason.only_paused(name, len(frontier.paused)) if waits else ""
        count, scored, used = frontier.asked, frontier.scored, frontier.asked - len(frontier.lost)
        remedy = end_reason.mend(name, budget, used, frontier.epochs.values(), scored=scored)
        judged = name, count, scored, remedy, frontier.streak, frontier.goal
        state, reason = self.ledger.look(lambda c: end_reason.ended(c, self.id, *judged))
        why = "" if reason or not frontier.within_budget else frontier.proposer.exhausted(count)
        if why or state != self._state:
            self.ledger.transact(lambda c: driver_queries.end(c, self.lease, self.id, state, count, why))
        return state, end_reason.nothing_left(count, why) if why else reason

    def _begin(self, row: StudyRow, past: Past) -> None:
        """Updates the study's row to this run's options, and queues paused trials that nothing else would continue."""
        frontier, resolved, budget = self.frontier, self.resolved, self.options.budget.over(Budget.of(row))
        used = Budget(frontier.asked - len(frontier.lost), sum(map(trained, past.rows)), self.time.seconds)
        self.options.budget.check(row.name, Budget.of(row), used)
        values = budget.columns()
        values |= remembered(row, resolved, self.options) if frontier.idle else continued(row, resolved, self.options)
        self._state = values.get("state", self._state)

        def body(connection: Connection) -> None:
            write_changes(connection, row, self.lease, values)
            before = row.spec.strategy
            waited = promoting(before) or breeding(before)
            if not (waited and (resolved.promotion or resolved.population)):  # Ray Tune's paused trials are queued too
                paused = [trial.number for trial in past.rows if trial.state == "paused"]
                driver_queries.thaw(connection, self.id, paused)
            if frontier.streak.forgiven > past.forgiven:
                driver_queries.forgive(connection, self.lease, self.id, frontier.streak.forgiven)

        self.lease.write(body)

    def _reconcile(self, row: StudyRow) -> None:
        """Makes the files agree with the rows, which a restored ledger or a lost object has set apart."""
        if self.frontier.asked:
            from hpo.storage.reconcile import reconcile

            for line in reconcile(self.ledger, self.options.home, row, self.lease):
                print(f"{row.name}: {line}.", file=sys.stderr)

    # While it is driven

    @contextmanager
    def workers(self, executor: Executor) -> Generator[None, None, None]:
        """Runs the executor's workers on the study, counts the time, and preempts the workers when it is used up."""
        options, name, study = self.options, self.resolved.spec.name, self.resolved.study
        arguments = options.storage, options.home, self.id, name, study
        executor.start(WorkerContext(*arguments, options.prepared, options.lease_timeout))

        def expire() -> None:
            self.frontier.expired = True
            executor.preempt()

        self.time.start()
        bound = self.frontier.rules.budget.seconds
        alarm = None if bound is None else self.time.alarm(bound, self._reserved, expire)
        try:
            yield
        finally:
            if alarm is not None:
                alarm.cancel()
            executor.stop(grace=options.lease_timeout)
            self._reclaimer.reclaim(counted=False)  # trials of workers that died or did not leave in time
        self.ledger.transact(self._renew)
        self.time.stop()

    @property
    def by_time_alone(self) -> bool:
        """Returns whether the search ends by its time alone, of which an end phase has its part."""
        budget = self.frontier.rules.budget
        return budget.seconds is not None and budget.trials is budget.epochs is None and self.resolved.finishes

    def _seconds_left(self) -> float:
        """Returns for how many seconds the search may go on."""
        bound = self.frontier.rules.budget.seconds
        return math.inf if bound is None else bound - self._reserved() - self.time.seconds

    def _reserved(self) -> float:
        """Returns the seconds of a study's time that belong to its end phase. Where the ledger cannot be read, the
        driver itself meets that."""
        if not self.by_time_alone:
            return 0.0
        name, bound = self.resolved.spec.name, self.frontier.rules.budget.seconds or 0.0
        try:
            return self.ledger.look(lambda connection: self.options.reserve(connection, name, bound))
        except HpoError:
            return 0.0

    def keep(self) -> None:
        """Raises the error that ended the lease's renewal, if any, and drops checkpoints beyond the byte limit."""
        self._heartbeat.check()
        self._retention.keep()

    def reclaim(self, on_silence: Callable[[str, int], None] = lambda host, pid: None) -> None:
        """Reclaims trials from dead or silent workers; `on_silence` is called for each silent one."""
        self._reclaimer.reclaim(on_silence=on_silence)
        self.frontier.look_again()

    def release(self) -> None:
        """Lets another process drive the study."""
        self._heartbeat.close()
        self._changes.close()
        self.lease.release()

    def _renew(self, connection: Connection) -> None:
        """Renews the lease and, while the study is driven, counts the time so far."""
        self.lease.check(connection)
        if self.time.runs:
            driver_queries.count_time(connection, self.id, self.time.seconds)
