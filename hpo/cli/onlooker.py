"""Shows a study that another process runs: it reads the ledger alone, so that the study never hears of it."""

from __future__ import annotations

from hpo.analysis.results import status
from hpo.cli.console import Console
from hpo.cli.live import View, animated
from hpo.clock import Clock, SystemClock
from hpo.ledger import Ledger, queries
from hpo.text import command

PAUSE = 0.25  # seconds between looks


def once(ledger: Ledger, name: str, console: Console) -> str:
    """Show how the study stands, as a picture on a terminal and else as text; its state."""
    if animated(console):
        console.print(View(ledger, name, console, workers=_workers(ledger, name)).picture())
    with ledger.read() as connection:
        found = queries.status(connection, name)
    if not animated(console):
        console.print(status.describe(found), markup=False, highlight=False, soft_wrap=True)
    if found.state == "interrupted":
        console.print(_alone(name), markup=False, highlight=False, soft_wrap=True)
    return found.state


def follow(ledger: Ledger, name: str, console: Console, clock: Clock | None = None) -> str:
    """Show the study until it ends; its state then. Says when nobody drives it any more, and when somebody does again;
    a driver may come at any time, so that is no end."""
    clock = clock or SystemClock()
    state, last = _state(ledger, name), "running"
    view = View(ledger, name, console, workers=_workers(ledger, name), clock=clock).start()
    try:
        while state in ("running", "interrupted"):
            if state != last:
                view.say(_alone(name) if state == "interrupted" else "the study is driven again.")
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
    """How many it was driven with last."""
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    return row["environment"].get("workers") or 1


def _alone(name: str) -> str:
    return f"nobody drives it: `{command(f'resume --study {name}')}` goes on with it."
