"""Records a study's events in the ledger and sends the recorded alerts until each is accepted.

The sending process holds the lease `alerts:<study id>`, so only one process sends at a time. An event is written in the
transaction that moves the cursor past it. An alert is sent, and marked after the answer has arrived. If the process is
killed between the two, the next process sends it again under the same id: so it is transmitted at least once, and a
receiver that compares ids sees it once.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpo.alerts import events, senders
from hpo.alerts.delivery_errors import NotTaken, Undelivered
from hpo.alerts.events import Event
from hpo.alerts.message import Message, content, message
from hpo.alerts.rules import Rule
from hpo.clock import Clock
from hpo.ledger import Ledger, answer, leases, queries, removal
from hpo.ledger.rows import AlertRow, ChangedTrial, Connection, LeaseRow, StudyRow
from hpo.ledger.views import alerts as alert_queries
from hpo.ledger.views.alerts import Alert
from hpo.storage.home import Home
from hpo.terminal import print
from trainer.runtime.failpoint import failpoint

PER_MINUTE = 10  # messages to one target; the last of them sums up the alerts above that number
DEADLINE = 45.0  # seconds for one message to any target
FIRST_PAUSE, MAX_PAUSE = 2.0, 300.0  # seconds before a target is tried again
MAX_WISH = 3600.0  # longest Retry-After of a target that is obeyed, in seconds
RENEWAL = 10.0  # seconds between renewals of the lease
PAGE = 200  # trials read at a time
DISK_PERIOD = 30.0  # seconds between checks of the disk

Targeted = list[tuple[str, Event]]  # a target and the event to send to it


@dataclass
class _Target:
    """Holds the state of a target.

    due       the monotonic time from which it may be tried again
    asked     the monotonic time until which it asked not to be tried
    failures  how many tries have failed in a row
    sent      the times of the messages of the last minute
    """

    due: float = 0.0
    not_before: float = 0.0
    failures: int = 0
    sent: deque[float] = field(default_factory=deque[float])

    def free(self, now: float) -> int:
        """Returns how many messages the target may get now."""
        while self.sent and now - self.sent[0] >= 60:
            self.sent.popleft()
        return PER_MINUTE - len(self.sent)


class Dispatcher:
    """Sends alerts about one study to the targets of `rules`. Its only state of its own, the time of the next try, may
    be lost."""

    def __init__(
        self, ledger: Ledger, study: str, home: Home, rules: Sequence[Rule], lease: leases.Lease, clock: Clock
    ) -> None:
        self._ledger, self._study, self._home, self._lease, self._clock = ledger, study, home, lease, clock
        self._rules = {rule.target: rule for rule in rules}
        self._targets = {target: _Target() for target in self._rules}
        self._quiet_since, self._revisions = clock.monotonic(), -1
        self._renewed, self._disk_due = clock.monotonic(), 0.0
        self._driver = self._holder()  # the driver of this run

    def _holder(self) -> LeaseRow | None:
        """Returns the lease of the study's current driver."""
        return self._ledger.look(lambda connection: self._state(connection)[1])

    @property
    def succeeded(self) -> bool:
        """Returns whether another run of the study has begun; its process then sends the waiting alerts."""
        now = self._holder()
        return self._driver is not None and now is not None and now.fence != self._driver.fence

    # Events

    def look(self, *, leaving: bool = False) -> None:
        """Writes the events since the last look; with `leaving` also how the run has ended."""
        while self._look_at_trials() == PAGE:
            pass
        study, driver, total = self._ledger.look(self._state)
        targeted = self._silent(study, total) + self._full(study, driver)
        if leaving and (ended := self._end(study)):
            targeted += self._to_all([ended])
        self._write(study, targeted)
        if self._clock.monotonic() - self._renewed > RENEWAL:
            self._lease.renew()
            self._renewed = self._clock.monotonic()

    def _look_at_trials(self) -> int:
        """Writes the events of changed trials, and returns how many had changed, at most a page."""

        def read(connection: Connection) -> tuple[StudyRow, Sequence[ChangedTrial], Targeted]:
            study = queries.study_row(connection, self._study)
            removal.check_whole(study)
            rows = alert_queries.pending(connection, study.id, PAGE)
            targeted = self._to_all(events.of_trials(connection, study, rows)) if rows else []
            wanted = [rule for rule in self._rules.values() if "target" in rule.on]
            best = answer.selected(connection, study) if wanted and rows else []
            reached = [(rule.target, e) for rule in wanted for e in events.target(study, best, rule.on["target"])]
            return study, rows, targeted + reached

        study, rows, targeted = self._ledger.look(read)
        self._write(study, targeted, rows)
        return len(rows)

    def _to_all(self, happened: Iterable[Event]) -> Targeted:
        """Returns each event paired with every target whose rule names its kind."""
        return [(rule.target, event) for event in happened for rule in self._rules.values() if event.kind in rule.on]

    def _state(self, connection: Connection) -> tuple[StudyRow, LeaseRow | None, int]:
        study = queries.study_row(connection, self._study)
        running = queries.study_state(connection, study) == "running"
        total = alert_queries.revisions(connection, study.id) if running else -1
        return study, leases.holder(connection, f"driver:{study.id}"), total

    def _silent(self, study: StudyRow, total: int) -> Targeted:
        """Returns the events of rules whose time without progress is over, measured by this process's own clock."""
        now = self._clock.monotonic()
        if total != self._revisions:
            self._quiet_since, self._revisions = now, total
        quiet = now - self._quiet_since if total >= 0 else 0.0
        wanted = [(rule, rule.on["no_progress"]) for rule in self._rules.values() if "no_progress" in rule.on]
        return [(rule.target, events.silence(study, s, total)) for rule, s in wanted if quiet >= s]

    def _full(self, study: StudyRow, driver: LeaseRow | None) -> Targeted:
        """Returns the events of rules whose share of the disk, or of the checkpoints' limit, is used up."""
        wanted = [(rule, rule.on["disk"]) for rule in self._rules.values() if "disk" in rule.on]
        if not wanted or driver is None or self._clock.monotonic() < self._disk_due:
            return []
        self._disk_due = self._clock.monotonic() + DISK_PERIOD
        kept = self._ledger.look(lambda connection: alert_queries.kept_bytes(connection, study.id))
        run = driver.fence
        return [(rule.target, e) for rule, share in wanted for e in events.full(study, self._home, kept, share, run)]

    def _end(self, study: StudyRow) -> Event | None:
        """Returns the event of the run's end. If another run has begun meanwhile, its own process reports its end."""
        if self._driver is not None and self.succeeded:
            return events.lost(study, self._driver)
        return self._ledger.look(lambda connection: events.end(connection, *self._state(connection)[:2]))

    def _write(self, study: StudyRow, targeted: Targeted, seen: Sequence[ChangedTrial] = ()) -> None:
        if not targeted and not seen:
            return
        wall = self._clock.wall()
        timestamp = datetime.datetime.fromtimestamp(wall, datetime.UTC).isoformat(timespec="seconds")
        new = [Alert(target, event.name, content(study, event, timestamp), wall) for target, event in targeted]
        self._lease.write(lambda connection: alert_queries.write(connection, study.id, new, seen))
        if new:
            failpoint("alerts.after_write")

    # Sending

    def hurry(self) -> None:
        """Makes targets due for one more try now, except those that asked not to be tried yet."""
        for state in self._targets.values():
            state.due = min(state.due, state.not_before)

    def deliver(self, *, leaving: bool = False) -> int:
        """Sends all messages that may be sent now, to all targets at once; returns how many alerts still wait."""
        study = self._ledger.look(lambda connection: queries.study_row(connection, self._study))
        while True:
            rows = self._ledger.look(lambda connection: alert_queries.waiting(connection, study.id))
            now = self._clock.monotonic()
            chosen: list[tuple[str, list[AlertRow]]] = []
            for target, state in self._targets.items():
                own_rows = [row for row in rows if row.target == target]
                if own_rows and now >= state.due and (batch := _choose(own_rows, state.free(now), leaving)):
                    chosen.append((target, batch))
            if not chosen:
                return len(rows)
            self._send_all(chosen)

    def _send_all(self, chosen: Sequence[tuple[str, list[AlertRow]]]) -> None:
        tries = [_Try(target, self._bound(batch)) for target, batch in chosen]
        end = self._clock.monotonic() + DEADLINE
        for attempt, (target, batch) in zip(tries, chosen, strict=True):
            attempt.join(max(end - self._clock.monotonic(), 0.0))
            self._settle(target, [row.id for row in batch], attempt.outcome())

    def _bound(self, batch: Sequence[AlertRow]) -> Message:
        """Returns the message for these alerts, and binds them to it before it is first sent."""
        bound = message([row.content for row in batch])
        if any(row.message != bound.id for row in batch):
            ids = [row.id for row in batch]
            self._lease.write(lambda connection: alert_queries.bind(connection, ids, bound.id))
        else:
            self._lease.renew()
        return bound

    def _settle(self, target: str, ids: Sequence[int], error: Undelivered | None) -> None:
        state, now = self._targets[target], self._clock.monotonic()
        if error is None:
            failpoint("alerts.after_send")
        outcome = "sent" if error is None else "refused" if isinstance(error, NotTaken) else "waiting"
        why = None if error is None else str(error)
        self._lease.write(lambda connection: alert_queries.settle(connection, ids, outcome, why))
        state.sent.append(now)
        if outcome == "waiting":
            pause = min(FIRST_PAUSE * 2**state.failures, MAX_PAUSE)
            state.not_before = now + min((error.after if error else None) or 0.0, MAX_WISH)
            state.failures, state.due = state.failures + 1, max(now + pause, state.not_before)
        else:
            state.failures = 0
        if why:
            print(f"{target}: {why}", flush=True)


def _choose(rows: Sequence[AlertRow], free: int, leaving: bool) -> list[AlertRow]:
    """Returns the alerts of a target's next message.

    They are those of a message already begun, else the first alert, or all alerts if it is the last message allowed. A
    process that is leaving sends all alerts that are left.
    """
    if free <= 0 and not leaving:
        return []
    if bound := rows[0].message:
        return [row for row in rows if row.message == bound]
    unbound = [row for row in rows if row.message is None]
    return unbound if free <= 1 else unbound[:1]


class _Try:
    """Makes one try to send, in a thread of its own: a slow server delays no other target."""

    def __init__(self, target: str, sent: Message) -> None:
        self._target, self._message = target, sent
        self._outcome: Undelivered | None = Undelivered(f"it does not answer within {DEADLINE:g} seconds")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.join = self._thread.join

    def _run(self) -> None:
        try:
            senders.send(self._target, self._message)
        except Undelivered as error:
            self._outcome = error
        except Exception as error:  # a bug affects one target, and is reported by its name
            self._outcome = Undelivered(f"it cannot be sent to ({type(error).__name__}: {error})")
        else:
            self._outcome = None

    def outcome(self) -> Undelivered | None:
        """Returns None if the message was accepted."""
        return self._outcome
