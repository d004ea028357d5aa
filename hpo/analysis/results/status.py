"""Writes how far studies are as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.idle import Idle, idle
from hpo.ledger import queries, worker_queries
from hpo.ledger.queries import Status
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import counted, portion, spelled

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

SHOWN = 10  # trials of a front


def facts_of(connection: Connection, name: str) -> dict[str, Any]:
    """How far a study is, its digest, how many trials were lanes, how much its workers wait, and the same of the
    studies derived from it, as JSON values."""
    study, status = queries.study_row(connection, name), queries.status(connection, name)
    waits = idle(connection, study["id"], status.state == "running")
    derived = [facts_of(connection, one) for one, of in queries.derived(connection).items() if of == name != one]
    lanes = dict(zip(("trials", "groups"), worker_queries.fused(connection, study["id"]), strict=True))
    told = {"lanes": lanes, "idle": waits and asdict(waits) | {"share": waits.share}, "derived": derived}
    return asdict(status) | {"digest": queries.digest(connection, study)} | told


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


def describe(status: Status, waits: Idle | None = None, lanes: tuple[int, int] = (0, 0)) -> str:
    """One study in a few lines; `waits` is how its workers have waited, `lanes` how many trials were trained as lanes
    of one model, and in how many groups."""
    cut_off = {} if status.state == "running" else {"running": "cut off (until a resume)"}
    states = ", ".join(f"{count} {cut_off.get(state, state)}" for state, count in status.trials.items() if count)
    first, _, best = line(status).partition("; ")
    epochs = portion(status.epochs_trained, status.max_epochs, "epoch")
    bound = f" of {spelled(status.max_seconds)}" if status.max_seconds else ""
    trained = f"{epochs} trained in {counted(status.attempts, 'attempt')}, {spelled(status.seconds_used)}{bound} used"
    took = f"imported from {status.imported}" if status.imported else trained
    untaken = [trouble.describe(target) for target, trouble in status.alerts.items()]
    idled = waiting(waits) if waits else ""
    fused = f"{counted(lanes[0], 'trial')} trained as lanes in {counted(lanes[1], 'group')}" if lanes[0] else ""
    return "\n  ".join(filter(None, [first, states or "no trials yet", took, fused, idled, best, *untaken]))


def waiting(waits: Idle) -> str:
    """How much of their time workers have waited, and for what."""
    reasons = {
        "for a trial to take": waits.for_a_trial,
        "at rungs for earlier trials": waits.at_rungs,
        "at the end for the last trials": waits.at_the_end,
    }
    named = ", ".join(f"{share:.1%} {what}" for what, share in reasons.items() if share >= 0.0005)
    return f"workers idle for {waits.share:.1%} of {spelled(waits.seconds)}" + (f": {named}" if named else "")
