"""Serves studies from a worker that was started by hand: which it trains for, and when it leaves."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from hpo.child_process import AFRESH
from hpo.clock import Clock, SystemClock
from hpo.errors import UserError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import Connection
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.text import counted
from trainer.errors import CheckpointError

LOOK = 1.0  # seconds between looks at who is driven


class JoinableStudies:
    """The studies a worker may train for: those of its own home that are driven, one or all.

    A study is driven while the holder of its driver's lease is not known to be dead, and its renewals have not stood
    still for the lease's time on this process's own clock. Called, it gives their ids, or None when it is time to
    leave: all that were driven have ended or lost their driver. Until one is, it gives none.
    """

    def __init__(self, ledger: Ledger, home: Home, study: str | None, clock: Clock | None = None) -> None:
        self._ledger, self._home, self._study = ledger, home, study
        self._clock = clock or SystemClock()
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}  # study -> its lease's (fence, renewals), since when
        self._joined: dict[int, str] = {}
        self._said: set[str] = set()
        self._found: list[int] = []
        self._next_look = self._clock.monotonic()
        if study is not None:
            ledger.look(lambda connection: queries.study_row(connection, study))  # there is one of that name

    def __call__(self) -> list[int] | None:
        if self._clock.monotonic() < self._next_look:
            return self._found
        self._next_look = self._clock.monotonic() + LOOK
        rows = [row for row in self._ledger.look(self._open_studies) if self._is_mine(row) and not self._silent(row)]
        for row in rows:
            if row["id"] not in self._joined:
                self._joined[row["id"]] = row["name"]
                say(f"joined study {row['name']}, which pid {row['pid']} on {row['host']} drives")
        self._found = [row["id"] for row in rows]
        if not rows and self._joined:
            return None
        if not rows and self._study is not None and (state := self._ledger.look(self._state)) != "open":
            say(f"study {self._study} is {state}: there is nothing to train")
            return None
        if not rows:
            what = f"study {self._study} is not driven" if self._study else "no study of this home is driven"
            self._say_once(f"{what}: waiting for `hpo run` or `hpo resume`")
        return self._found

    def _open_studies(self, connection: Connection) -> list[dict[str, Any]]:
        """Open studies that have trials, each with its driver's lease, if somebody holds that who is not dead."""
        held = leases.holders(connection)
        rows: list[dict[str, Any]] = []
        for study in queries.asked_for(connection, self._study):  # the driver marks its home before it asks
            lease = held.get(f"driver:{study['id']}")
            if lease and not is_dead(lease["host"], lease["pid"], lease["pid_started"]):
                rows.append({**lease, **study})
        return rows

    def _state(self, connection: Connection) -> str:
        return queries.study_row(connection, self._study or "")["state"]

    def _silent(self, row: dict[str, Any]) -> bool:
        token, now = (row["fence"], row["renewals"]), self._clock.monotonic()
        seen, since = self._seen.get(row["id"], (None, now))
        self._seen[row["id"]] = token, since if seen == token else now
        return now - self._seen[row["id"]][1] >= row["lease_seconds"]

    def _is_mine(self, row: dict[str, Any]) -> bool:
        """Whether this process may train it and sees its checkpoints; where it was named, UserError if not."""
        if row["id"] in self._joined:
            return True
        try:
            if row["environment"].get("executor") == "ray-tune":
                raise UserError(
                    f"study {row['name']} is driven by Ray Tune, which starts its trials itself: no worker joins it, "
                    "but nodes may join its cluster."
                )
            locations.check(self._home, row, row["host"])
        except (UserError, CheckpointError) as error:
            if self._study is not None:
                raise
            self._say_once(f"left out: {error}")
            return False
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


def join(storage: str, home: Home, study: str | None) -> int:
    """Train for the studies of `home` that are driven, or for the one named; the exit code once they are done."""
    ledger = Ledger(storage, create=False)
    driven = JoinableStudies(ledger, home, study)
    if driven() is None:
        return 0
    from hpo.workers.worker import Worker, serve  # and with it torch

    worker = Worker(ledger, home, "joined", say, worth_while=lambda study_id, _: study_id in (driven() or ()))
    signals: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        worker.preempt()
        os.write(2, b"\nleaving: the trial is saved and waits for another worker; once more leaves at once.\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    code = serve(worker, driven)
    ledger.close()
    if code == AFRESH:
        say(f"begins afresh after {counted(worker.trained, 'trial')}")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    why = "as it was told to" if signals else "nothing it joined is driven any more" if not code else "fenced"
    say(f"left: {why}; {counted(worker.trained, 'trial')}")
    return 128 + signals[0] if signals and not code else code


def say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)
