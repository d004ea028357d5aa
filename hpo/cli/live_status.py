"""Shows a study that another process runs; it only reads the ledger, so it does not affect the study."""

from __future__ import annotations

from hpo.analysis.results import status
from hpo.clock import Clock, SystemClock
from hpo.display.console import Console
from hpo.display.live import View, animated
from hpo.ledger import Ledger, queries
from hpo.text import command

PAUSE = 0.25  # seconds between looks


def once(ledger: Ledger, name: str, console: Console) -> str:
    """Shows the study's progress once, as a picture on a terminal and as text elsewhere. Returns its state."""
    if animated(console):
        console.print(View(ledger, name, console, workers=_workers(ledger, name)).picture())
    with ledger.read() as connection:
        progress = queries.status(connection, name)
    if not animated(console):
        console.print(status.describe(progress), markup=False, highlight=False, soft_wrap=True)
    if progress.state == "interrupted":
        console.print(_undriven(name), markup=False, highlight=False, soft_wrap=True)
    return progress.state


def follow(ledger: Ledger, name: str, console: Console, clock: Clock | None = None) -> str:
    """Shows the study until it ends, and returns its state.

    An interrupted study may be resumed at any time, so it continues to watch; it prints when the driver leaves and when
    a new driver starts.
    """
    clock = clock or SystemClock()
    state, last = _state(ledger, name), "running"
    view = View(ledger, name, console, workers=_workers(ledger, name), clock=clock).start()
    try:
        while state in ("running", "interrupted"):
            if state != last:
                view.say(_undriven(name) if state == "interrupted" else "the study is driven again.")
                view.progress.begin()
            view.tick()
            clock.sleep(PAUSE)
            state, last = _state(ledger, name), state
    finally:
        view.stop()
    with ledger.read() as connection:
        view.say(status.line(queries.status(connection, name)))
    return state


def _state(ledger: Ledger, name: str) -> str:
    return ledger.look(lambda connection: queries.study_state(connection, queries.study_row(connection, name)))


def _workers(ledger: Ledger, name: str) -> int:
    """Returns the number of workers with which the study was last driven."""
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    return row.environment.get("workers") or 1


def _undriven(name: str) -> str:
    return f"nobody drives it: `{command(f'resume --study {name}')}` goes on with it."
