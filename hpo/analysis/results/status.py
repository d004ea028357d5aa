"""Writes how far studies are as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpo.ledger import queries
from hpo.ledger.queries import Status
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import counted, portion, spelled

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

SHOWN = 10  # trials of a front


def facts_of(connection: Connection, name: str) -> dict[str, Any]:
    """How far a study is, its digest, and the same of the studies derived from it, as JSON values."""
    digest = queries.digest(connection, queries.study_row(connection, name))
    derived = [facts_of(connection, one) for one, of in queries.derived(connection).items() if of == name != one]
    return asdict(queries.status(connection, name)) | {"digest": digest, "derived": derived}


def line(status: Status) -> str:
    """One study in a line: `mlp: complete, 20 of 20 trials ended; best: trial 3, 0.9`."""
    ended = sum(status.trials[state] for state in TERMINAL_STATES) - status.replaced
    ended = portion(ended, status.requested, "trial")
    best = f"; best: trial {status.best.number}, {status.best.value:.6g}" if status.best else ""
    if status.front:
        numbers = ", ".join(str(one.number) for one in status.front[:SHOWN])
        more = f" and {len(status.front) - SHOWN} more" if len(status.front) > SHOWN else ""
        best = f"; on the front: {'trial' if len(status.front) == 1 else 'trials'} {numbers}{more}"
    return f"{status.study}: {status.state}, {ended} ended{best}"


def describe(status: Status) -> str:
    """One study in a few lines."""
    cut_off = {} if status.state == "running" else {"running": "cut off (until a resume)"}
    states = ", ".join(f"{count} {cut_off.get(state, state)}" for state, count in status.trials.items() if count)
    first, _, best = line(status).partition("; ")
    epochs = portion(status.epochs_trained, status.max_epochs, "epoch")
    bound = f" of {spelled(status.max_seconds)}" if status.max_seconds else ""
    trained = f"{epochs} trained in {counted(status.attempts, 'attempt')}, {spelled(status.seconds_used)}{bound} used"
    took = f"imported from {status.imported}" if status.imported else trained
    untaken = [trouble.describe(target) for target, trouble in status.alerts.items()]
    return "\n  ".join(filter(None, [first, states or "no trials yet", took, best, *untaken]))
