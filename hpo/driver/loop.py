"""Drives one study: observes halted trials, decides the next actions, commits them and lets the workers continue.

It always starts from the ledger; resuming is not a mode. `frontier.py` decides, `leased_study.py` reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable

from hpo.driver.drivers import StudyDriver


class Driver(StudyDriver):
    """Drives a study by its own sampler and strategy."""

    def drive(self, on_tick: Callable[[], None]) -> None:
        study, frontier, clock = self.study, self.study.frontier, self._clock
        next_look, due = clock.monotonic(), True
        while not self._stopping:
            if due or study.written():
                study.observe()
                actions = frontier.next()
                study.commit(actions)
                if due := bool(actions.retire):
                    continue  # these have ended, and what follows from that is decided at once
                if actions.done:
                    break
            if frontier.expired or frontier.stuck:
                break
            study.keep()
            if due := clock.monotonic() >= next_look:
                study.reclaim(on_silence=self._executor.end)
                next_look = clock.monotonic() + min(1.0, self._options.lease_timeout / 3)
            if not self._executor.step():
                clock.sleep(study.pause)
            on_tick()
        on_tick()  # shows the last ends, or that it stops: workers take a while to leave

    def all_ended(self) -> bool:
        """Returns whether nothing is left to train. Reads the ledger, so signal handlers must not call it."""
        return self.study.conclude()
