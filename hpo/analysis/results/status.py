"""Formats the progress of studies as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.forecast import StudyForecast, forecast_of
from hpo.analysis.results.idle import Idle, idle
from hpo.ledger import queries
from hpo.ledger.continuing import continuing
from hpo.ledger.queries import Status
from hpo.ledger.removed import Removed
from hpo.ledger.rows import StudyRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import workers as worker_queries
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted, portion, spelled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home

SHOWN = 10  # trials of a front that a line names


def facts_of(connection: Connection, name: str, home: Home) -> dict[str, Any]:
    """Returns the progress of a study as JSON values.

    They include its reason to end, its digest, its lanes, its workers' idle time, MLflow's lag, and the facts of the
    studies derived from it.
    """
    study, status = queries.study_row(connection, name), queries.status(connection, name)
    waits = idle(connection, study.id, status.state == "running")
    derived = [
        facts_of(connection, child, home)
        for child, source in queries.derived(connection).items()
        if source == name != child
    ]
    lanes = dict(zip(("trials", "groups"), worker_queries.fused(connection, study.id), strict=True))
    facts = {"lanes": lanes, "idle": waits and asdict(waits) | {"share": waits.share}, "derived": derived}
    more = forecast_of(connection, study)
    facts |= {"reason": why_ended(connection, study, status), "behind": behind(connection, study, home)}
    facts |= {"forecast": more and vars(more)}
    return asdict(status) | {"digest": queries.digest(connection, study)} | facts


def line(status: Status) -> str:
    """Returns a study in a line, such as `mlp: complete, 20 of 20 trials ended; best: trial 3, 0.9`."""
    best = f"; best: trial {status.best.number}, {status.best.value:.6g}" if status.best else ""
    best += f", {status.best.finished.described()}" if status.best and status.best.finished else ""
    best += f", {status.best.seeds.described()}" if status.best and status.best.seeds else ""
    if status.front:
        numbers = ", ".join(str(trial.number) for trial in status.front[:SHOWN])
        more = f" and {len(status.front) - SHOWN} more" if len(status.front) > SHOWN else ""
        best = f"; on the front: {'trial' if len(status.front) == 1 else 'trials'} {numbers}{more}"
    return f"{status.study}: {progress(status)}{best}"


def ended(status: Status) -> int:
    """Returns how many of the requested trials have ended."""
    return sum(status.trials[state] for state in TERMINAL_STATES) - status.replaced


def progress(status: Status) -> str:
    """Returns the state of a study and how many trials have ended, such as `complete, 20 of 20 trials ended`."""
    return f"{status.state}, {portion(ended(status), status.requested, 'trial')} ended"


def describe(
    status: Status, waits: Idle | None = None, lanes: tuple[int, int] = (0, 0), more: StudyForecast | None = None
) -> str:
    """One study in a few lines; `waits` is how its workers have waited, `lanes` how many trials were trained as lanes
    of one model, and in how many groups; `more` is what more trials are expected to bring."""
    cut_off = {} if status.state == "running" else {"running": "to resume"}
    states = ", ".join(f"{count} {cut_off.get(state, state)}" for state, count in status.trials.items() if count)
    removed = status.removed_cost
    states += f"; {removed.count} of them removed, which trained {spent(removed)}" if removed.count else ""
    first, _, best = line(status).partition("; ")
    epochs = portion(status.epochs_trained, status.max_epochs, "epoch")
    bound = f" of {spelled(status.max_seconds)}" if status.max_seconds else ""
    trained = f"{epochs} trained in {counted(status.attempts, 'attempt')}, {spelled(status.seconds_used)}{bound} used"
    took = f"imported from {status.imported}" if status.imported else trained
    untaken = [trouble.describe(target) for target, trouble in status.alerts.items()]
    idled = waiting(waits) if waits else ""
    fused = f"{counted(lanes[0], 'trial')} trained as lanes in {counted(lanes[1], 'group')}" if lanes[0] else ""
    expected = more.described() if more else ""
    return "\n  ".join(filter(None, [first, states or "no trials yet", took, fused, idled, best, expected, *untaken]))


def spent(gone: Removed) -> str:
    """Returns what removed trials have cost: `12 epochs in 3m20s`."""
    return f"{counted(gone.epochs, 'epoch')} in {spelled(gone.seconds)}"


def removed_line(gone: Removed) -> str:
    """Returns a sentence about the trials that `hpo rm N` has removed; empty if there are none."""
    if not gone.count:
        return ""
    verb, they = ("is", "it") if gone.count == 1 else ("are", "they")
    return (
        f"{counted(gone.count, 'trial')} {verb} removed and not shown: {they} "
        f"trained {spent(gone)}, which the study's totals count."
    )


def after(connection: Connection, status: Status, home: Home) -> Iterator[str]:
    """Yields lines about a study without a driver: why it has ended, how far MLflow lags, and what to do next."""
    if status.state == "running":
        return
    study = queries.study_row(connection, status.study)
    if reason := why_ended(connection, study, status):
        yield reason
    if lag := behind(connection, study, home):
        yield behind_by(lag)
    if status.state in ("stopped", "interrupted"):
        resumes = status.state == "interrupted" and not reason and not status.imported
        failed, saves = (
            driver_queries.failed(connection, study.id),
            driver_queries.any_saved(connection, study.id),
        )
        again = continuing(connection, study) if resumes else ""
        yield from aligned(next_commands(status.study, failed, saves, again))
    else:
        yield from aligned(_phases_left(connection, status.study))


def _phases_left(connection: Connection, study: str) -> dict[str, str]:
    """Returns command -> its effect, for the phases after a complete search that were interrupted."""
    derived = [name for name, source in queries.derived(connection).items() if source == study]
    waiting = [queries.study_row(connection, name) for name in derived if _waits(connection, name)]
    again = command(f"resume --study {study}")
    left = [row.name for row in waiting if continuing(connection, row) == again]
    return {again: f"goes on with study {left[0]}, which was interrupted"} if left else {}


def _waits(connection: Connection, study: str) -> bool:
    """Returns whether a study was interrupted and can go on."""
    status = queries.status(connection, study)
    return status.state == "interrupted" and not why_ended(connection, queries.study_row(connection, study), status)


def why_ended(connection: Connection, study: StudyRow, status: Status) -> str:
    """Returns the message of the run that ended the study before its budget was used; empty if none did."""
    from hpo.driver import end_reason

    tried = sum(status.trials.values())
    if status.state == "stopped":
        return end_reason.of_stopped(connection, study)
    if status.state == "interrupted" and status.max_seconds and status.seconds_used >= status.max_seconds:
        return end_reason.time_used_up(status.study, status.max_seconds, status.seconds_used)
    if status.state == "complete" and driver_queries.nothing_left(connection, study.id, tried):
        left = queries.newest_event(connection, study.id, "nothing_left")
        return end_reason.nothing_left(tried, left["why"]) if left else ""
    return end_reason.goal_of(connection, study).explain(status.study) if status.state == "complete" else ""


def behind(connection: Connection, study: StudyRow, home: Home) -> int:
    """Returns how many of the study's transactions MLflow has not received, by the ledger's cursor."""
    from hpo.tracking import projection
    from hpo.tracking.uri import of_rows, tracker_name

    return projection.behind(connection, tracker_name(of_rows([study], home)), study)


def behind_by(transactions: int, remedy: str = "") -> str:
    remedy = remedy or f"`{command('sync')}` sends what is missing; nothing is lost."
    return f"MLflow is behind by {counted(transactions, 'transaction')}: {remedy}"


def next_commands(study: str, failed: Collection[int], saves: bool, continuing: str) -> dict[str, str]:
    """Returns command -> its effect, for a study some of whose trials have `failed`.

    saves       whether a trial has saved a checkpoint
    continuing  the command that continues the study; empty if none does
    """
    on = "goes on from the last checkpoints" if saves else "goes on; trials that were cut off start again"
    commands = {command(f"show {min(failed)} --study {study}"): "why it failed"} if failed else {}
    return commands | ({continuing: on} if continuing else {})


def aligned(commands: Mapping[str, str]) -> list[str]:
    """Returns a line for each command."""
    width = max(map(len, commands), default=0)
    return [f"{command:<{width}}  {purpose}" for command, purpose in commands.items()]


def waiting(waits: Idle) -> str:
    """Returns the share of time that workers have waited, and for what."""
    reasons = {
        "waiting for a new trial": waits.for_a_trial,
        "at rungs for earlier trials": waits.at_rungs,
        "at the end for the last trials": waits.at_the_end,
    }
    named = ", ".join(f"{share:.1%} {reason}" for reason, share in reasons.items() if share >= 0.0005)
    return f"workers idle for {waits.share:.1%} of {spelled(waits.seconds)}" + (f": {named}" if named else "")
