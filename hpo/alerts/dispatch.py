"""Looks for what has happened, writes it down, and sends what is written down until it is taken.

Whoever sends holds the lease `alerts:<study id>`, so one process at a time does. An event is written in the transaction
that moves the cursor past it. It is sent, and marked once the answer is there: killed between the two, the next process
sends it again under the same id. So it is on the wire at least once, and once by its id.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpo.alerts import events, senders
from hpo.alerts.events import Event
from hpo.alerts.message import Message, content, message
from hpo.alerts.rules import Rule
from hpo.alerts.senders import NotTaken, Undelivered
from hpo.clock import Clock
from hpo.ledger import Ledger, alert_queries, leases, queries, removal
from hpo.ledger.alert_queries import Alert
from hpo.ledger.rows import Connection, RowMapping
from hpo.storage.home import Home
from hpo.terminal import print
from trainer.runtime.failpoint import failpoint

PER_MINUTE = 10  # messages to one target; what comes above that is summed up in the last of them
DEADLINE = 45.0  # seconds for one message, to whatever target
FIRST_PAUSE, MAX_PAUSE = 2.0, 300.0  # seconds before a target is tried again
MAX_WISH = 3600.0  # seconds that a target may ask for by Retry-After
RENEWAL = 10.0  # seconds between renewals of the lease
PAGE = 200  # trials that are read at once
DISK_PERIOD = 30.0  # seconds between looks at the disk

Told = list[tuple[str, Event]]  # a target, and what it is to be told


@dataclass
class _Target:
    """When a target may be tried again, by the monotonic clock; until when it asked to be left alone; and when it was
    sent something in the last minute."""

    due: float = 0.0
    asked: float = 0.0
    failures: int = 0
    sent: deque[float] = field(default_factory=deque[float])

    def free(self, now: float) -> int:
        """How many messages it may get now."""
        while self.sent and now - self.sent[0] >= 60:
            self.sent.popleft()
        return PER_MINUTE - len(self.sent)


class Dispatcher:
    """Tells the targets of `rules` about one study. Holds only what can be lost: when to try again."""

    def __init__(
        self, ledger: Ledger, study: str, home: Home, rules: Sequence[Rule], lease: leases.Lease, clock: Clock
    ) -> None:
        self._ledger, self._study, self._home, self._lease, self._clock = ledger, study, home, lease, clock
        self._rules = {rule.target: rule for rule in rules}
        self._targets = {target: _Target() for target in self._rules}
        self._quiet_since, self._revisions = clock.monotonic(), -1
        self._renewed, self._disk_due = clock.monotonic(), 0.0
        self._driver = self._holder()  # whose run this is

    def _holder(self) -> RowMapping | None:
        """The study's driver now."""
        return self._ledger.look(lambda connection: self._state(connection)[1])

    @property
    def succeeded(self) -> bool:
        """Whether another run of the study has begun: what waits is its process's to send, once this one has left."""
        now = self._holder()
        return self._driver is not None and now is not None and now["fence"] != self._driver["fence"]

    # What has happened

    def look(self, *, leaving: bool = False) -> None:
        """Write down what has happened since the last look; with `leaving` how the run has ended, too."""
        while self._look_at_trials() == PAGE:
            pass
        study, driver, total = self._ledger.look(self._state)
        told = self._silent(study, total) + self._full(study, driver)
        if leaving and (ended := self._end(study)):
            told += self._to_all([ended])
        self._write(study, told)
        if self._clock.monotonic() - self._renewed > RENEWAL:
            self._lease.renew()
            self._renewed = self._clock.monotonic()

    def _look_at_trials(self) -> int:
        """How many had changed, a page at most."""

        def read(connection: Connection) -> tuple[RowMapping, Sequence[RowMapping], Told]:
            study = queries.study_row(connection, self._study)
            removal.check_whole(study)
            rows = alert_queries.pending(connection, study["id"], PAGE)
            told = self._to_all(events.of_trials(connection, study, rows)) if rows else []
            wanted = [rule for rule in self._rules.values() if "target" in rule.on]
            best = queries.bests(connection, study) if wanted and rows else []
            reached = [(rule.target, e) for rule in wanted for e in events.target(study, best, rule.on["target"])]
            return study, rows, told + reached

        study, rows, told = self._ledger.look(read)
        self._write(study, told, rows)
        return len(rows)

    def _to_all(self, found: Iterable[Event]) -> Told:
        """Each event with every target that is to be told of its kind."""
        return [(rule.target, event) for event in found for rule in self._rules.values() if event.kind in rule.on]

    def _state(self, connection: Connection) -> tuple[RowMapping, RowMapping | None, int]:
        study = queries.study_row(connection, self._study)
        running = queries.study_state(connection, study) == "running"
        total = alert_queries.revisions(connection, study["id"]) if running else -1
        return study, leases.holder(connection, f"driver:{study['id']}"), total

    def _silent(self, study: RowMapping, total: int) -> Told:
        """That nothing has moved for as long as a rule says, by this process's own clock."""
        now = self._clock.monotonic()
        if total != self._revisions:
            self._quiet_since, self._revisions = now, total
        quiet = now - self._quiet_since if total >= 0 else 0.0
        wanted = [(rule, rule.on["no_progress"]) for rule in self._rules.values() if "no_progress" in rule.on]
        return [(rule.target, events.silence(study, s, total)) for rule, s in wanted if quiet >= s]

    def _full(self, study: RowMapping, driver: RowMapping | None) -> Told:
        """That the disk, or what checkpoints may take, is used up as far as a rule says."""
        wanted = [(rule, rule.on["disk"]) for rule in self._rules.values() if "disk" in rule.on]
        if not wanted or driver is None or self._clock.monotonic() < self._disk_due:
            return []
        self._disk_due = self._clock.monotonic() + DISK_PERIOD
        kept = self._ledger.look(lambda connection: alert_queries.kept_bytes(connection, study["id"]))
        run = driver["fence"]
        return [(rule.target, e) for rule, share in wanted for e in events.full(study, self._home, kept, share, run)]

    def _end(self, study: RowMapping) -> Event | None:
        """How the run has ended. Where another has begun meanwhile, that run's own process says how it ends."""
        if self._driver is not None and self.succeeded:
            return events.lost(study, self._driver)
        return self._ledger.look(lambda connection: events.end(connection, *self._state(connection)[:2]))

    def _write(self, study: RowMapping, told: Told, seen: Sequence[RowMapping] = ()) -> None:
        if not told and not seen:
            return
        wall = self._clock.wall()
        at = datetime.datetime.fromtimestamp(wall, datetime.UTC).isoformat(timespec="seconds")
        new = [Alert(target, event.name, content(study, event, at), wall) for target, event in told]
        self._lease.write(lambda connection: alert_queries.write(connection, study["id"], new, seen))
        if new:
            failpoint("alerts.after_write")

    # What is to be told

    def hurry(self) -> None:
        """Try once more now, but for targets that have asked to be left alone."""
        for state in self._targets.values():
            state.due = min(state.due, state.asked)

    def deliver(self, *, leaving: bool = False) -> int:
        """Send what may be sent now, to all targets at once; how many alerts still wait."""
        study = self._ledger.look(lambda connection: queries.study_row(connection, self._study))
        while True:
            rows = self._ledger.look(lambda connection: alert_queries.waiting(connection, study["id"]))
            now = self._clock.monotonic()
            chosen: list[tuple[str, list[RowMapping]]] = []
            for target, state in self._targets.items():
                mine = [row for row in rows if row["target"] == target]
                if mine and now >= state.due and (batch := _choose(mine, state.free(now), leaving)):
                    chosen.append((target, batch))
            if not chosen:
                return len(rows)
            self._send_all(chosen)

    def _send_all(self, chosen: Sequence[tuple[str, list[RowMapping]]]) -> None:
        tries = [_Try(target, self._bound(batch)) for target, batch in chosen]
        end = self._clock.monotonic() + DEADLINE
        for one, (target, batch) in zip(tries, chosen, strict=True):
            one.join(max(end - self._clock.monotonic(), 0.0))
            self._settle(target, [row["id"] for row in batch], one.outcome())

    def _bound(self, batch: Sequence[RowMapping]) -> Message:
        """The message of these alerts, which they are bound to before it is first sent."""
        bound = message([row["content"] for row in batch])
        if any(row["message"] != bound.id for row in batch):
            ids = [row["id"] for row in batch]
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
            state.asked = now + min((error.after if error else None) or 0.0, MAX_WISH)
            state.failures, state.due = state.failures + 1, max(now + pause, state.asked)
        else:
            state.failures = 0
        if why:
            print(f"{target}: {why}", flush=True)


def _choose(rows: Sequence[RowMapping], free: int, leaving: bool) -> list[RowMapping]:
    """The alerts of a target's next message: those of one that was begun, else the first, or all in the last message
    that it may get. Who is leaving sends all that is left."""
    if free <= 0 and not leaving:
        return []
    if bound := rows[0]["message"]:
        return [row for row in rows if row["message"] == bound]
    unbound = [row for row in rows if row["message"] is None]
    return unbound if free <= 1 else unbound[:1]


class _Try:
    """One try to send, in a thread of its own: a server that takes its time holds up no other target."""

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
        except Exception as error:  # a bug is one target's, and is told as what it is
            self._outcome = Undelivered(f"it cannot be sent to ({type(error).__name__}: {error})")
        else:
            self._outcome = None

    def outcome(self) -> Undelivered | None:
        """None where it was taken."""
        return self._outcome
