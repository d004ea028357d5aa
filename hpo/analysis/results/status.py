"""Writes how far studies are as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.idle import Idle, idle
from hpo.ledger import driver_queries, queries, worker_queries
from hpo.ledger.queries import Status
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted, portion, spelled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from hpo.ledger.rows import Connection, RowMapping
    from hpo.storage.home import Home

SHOWN = 10  # trials of a front


def facts_of(connection: Connection, name: str, home: Home) -> dict[str, Any]:
    """How far a study is and why it has ended, its digest, how many trials were lanes, how much its workers wait, how
    far MLflow is behind, and the same of the studies derived from it, as JSON values."""
    study, status = queries.study_row(connection, name), queries.status(connection, name)
    waits = idle(connection, study["id"], status.state == "running")
    derived = [facts_of(connection, one, home) for one, of in queries.derived(connection).items() if of == name != one]
    lanes = dict(zip(("trials", "groups"), worker_queries.fused(connection, study["id"]), strict=True))
    told = {"lanes": lanes, "idle": waits and asdict(waits) | {"share": waits.share}, "derived": derived}
    told |= {"reason": why_ended(connection, study, status), "behind": behind(connection, study, home)}
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


def after(connection: Connection, status: Status, home: Home) -> Iterator[str]:
    """What a study that nobody drives has to say: why it has ended, how far MLflow is behind, and what to do next."""
    if status.state == "running":
        return
    study = queries.study_row(connection, status.study)
    if reason := why_ended(connection, study, status):
        yield reason
    if lag := behind(connection, study, home):
        yield behind_by(lag)
    if status.state in ("stopped", "interrupted"):
        resumes = status.state == "interrupted" and not reason and not status.imported
        yield from aligned(next_commands(status.study, driver_queries.failed(connection, study["id"]), resumes))


def why_ended(connection: Connection, study: RowMapping, status: Status) -> str:
    """Why the study has ended before what was asked for was done, as its run said; empty where it has not."""
    from hpo.driver import end_reason

    asked = sum(status.trials.values())
    if status.state == "stopped":
        return end_reason.of_stopped(connection, study)
    if status.state == "interrupted" and status.max_seconds and status.seconds_used >= status.max_seconds:
        return end_reason.time_used_up(status.study, status.max_seconds, status.seconds_used)
    if status.state == "complete" and driver_queries.nothing_left(connection, study["id"], asked):
        left = queries.newest_event(connection, study["id"], "nothing_left")
        return end_reason.nothing_left(asked, left["why"]) if left else ""
    return ""


def behind(connection: Connection, study: RowMapping, home: Home) -> int:
    """How many of the ledger's transactions on the study MLflow has not got, as the ledger's cursor of it says."""
    from hpo.tracking import projection
    from hpo.tracking.uri import of_rows, tracker_name

    return projection.behind(connection, tracker_name(of_rows([study], home)), study)


def behind_by(transactions: int, remedy: str = "") -> str:
    remedy = remedy or f"`{command('sync')}` sends what is missing; nothing is lost."
    return f"MLflow is behind by {counted(transactions, 'transaction')}: {remedy}"


def next_commands(study: str, failed: Collection[int], resumes: bool) -> dict[str, str]:
    """Command -> what it does, of a study some trials of which have `failed`, and which may go on."""
    commands = {command(f"show {min(failed)} --study {study}"): "why it failed"} if failed else {}
    return commands | ({command(f"resume --study {study}"): "goes on from the last checkpoints"} if resumes else {})


def aligned(commands: Mapping[str, str]) -> list[str]:
    """A line for each command."""
    width = max(map(len, commands), default=0)
    return [f"{command:<{width}}  {what}" for command, what in commands.items()]


def waiting(waits: Idle) -> str:
    """How much of their time workers have waited, and for what."""
    reasons = {
        "for a trial to take": waits.for_a_trial,
        "at rungs for earlier trials": waits.at_rungs,
        "at the end for the last trials": waits.at_the_end,
    }
    named = ", ".join(f"{share:.1%} {what}" for what, share in reasons.items() if share >= 0.0005)
    return f"workers idle for {waits.share:.1%} of {spelled(waits.seconds)}" + (f": {named}" if named else "")
