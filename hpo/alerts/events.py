"""Finds the events to report in the ledger, each under a permanent name.

A name is made from the event, such as `trial/3/failed`, and not from the time of the look. A process that was killed
and looks again finds the same event under the same name, and the ledger holds each name once per target.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.door import option
from hpo.ledger import answer
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import ChangedTrial, Connection, EventRow, LeaseRow, StudyRow, ValueRow
from hpo.ledger.views import alerts as alert_queries
from hpo.ledger.views import mirror as mirror_queries
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage.home import Home
from hpo.text import command, megabytes, spelled

_MOST = 1000  # characters of an error that are sent; `hpo show` shows all of it
_SPIKE, _MEMORY, _LOST, _DATA = "loss_jumped", "out_of_memory", "worker_lost", "data_worker_lost"
NOTES = (_SPIKE, _MEMORY, _LOST, _DATA)  # events of trials that are reported


@dataclass(frozen=True)
class Event:
    """An event of a study.

    name    unique within the study
    kind    one of rules.EVENTS
    title   one line for people; `text` holds more
    trial   the number of its trial
    """

    name: str
    kind: str
    title: str
    text: str = ""
    trial: int | None = None
    values: Mapping[str, Any] | None = None


def of_trials(connection: Connection, study: StudyRow, rows: Sequence[ChangedTrial]) -> list[Event]:
    """Returns the events of trials since the last look; `rows` are those of `alert_queries.pending`."""
    ids, happened = [row.id for row in rows], list[Event]()
    numbers = {row.id: row.number for row in rows}
    for note in alert_queries.new_events(connection, ids, NOTES):
        if note.trial_id is not None:
            happened.append(_note(study.name, numbers[note.trial_id], note))
    newly_ended = [row for row in rows if row.state in TERMINAL_STATES and row.was not in TERMINAL_STATES]
    happened += filter(None, (_failed(study.name, row) for row in newly_ended))
    happened += _not_finite(study.name, rows, newly_ended, alert_queries.new_not_finite(connection, ids))
    if any(row.state == "complete" for row in newly_ended):
        happened += _bests(connection, study, {row.number for row in newly_ended})
    return happened


def target(study: StudyRow, best: Sequence[answer.Best], value: float) -> Iterator[Event]:
    """Yields an event if the best value has reached `value`."""
    [objective] = study.spec.objectives
    sign = -1 if objective["direction"] == "maximize" else 1
    if best and sign * best[0].value <= sign * value:
        title = f"{objective['metric']} of study {study.name} has reached {value:g}"
        text = f"trial {best[0].number} has {best[0].value:.6g}."
        yield Event(f"target/{value!r}", "target", title, text, best[0].number, best[0].values)


def full(study: StudyRow, home: Home, kept: int, share: float, run: int) -> Iterator[Event]:
    """Yields an event if `share` of the home's disk, or of the checkpoints' limit, is used; once in each run."""
    try:
        disk = shutil.disk_usage(home.root)
    except OSError as error:
        yield Event(f"disk/{run}", "disk", f"the home of study {study.name} cannot be read", str(error))
        return
    if disk.total and 1 - disk.free / disk.total >= share:
        title = f"the disk of study {study.name} is {1 - disk.free / disk.total:.0%} full"
        yield Event(f"disk/{run}", "disk", title, f"{megabytes(disk.free)} are free for {home.root}.")
    most = study.environment.get("max_bytes")
    if most and kept / most >= share:
        title = f"the checkpoints of study {study.name} take {kept / most:.0%} of {option('max_bytes')}"
        yield Event(f"quota/{run}", "disk", title, f"They take {megabytes(kept)} of {megabytes(most)}.")


def silence(study: StudyRow, seconds: float, revisions: int) -> Event:
    """Returns the event that no trial has reported or ended for `seconds`; `revisions` identifies the quiet period."""
    title = f"study {study.name} makes no progress"
    return Event(f"silence/{revisions}", "no_progress", title, f"No trial has reported for {spelled(seconds)}.")


def end(connection: Connection, study: StudyRow, driver: LeaseRow | None) -> Event | None:
    """Returns the event of a run's end, once no process is left to report it; None while the run goes on.

    A driver that was killed is lost; a driver that lives and lets this process leave is interrupted.
    """
    name, state = study.name, study.state
    num_ended = sum(mirror_queries.counts(connection, study.id).get(terminal, 0) for terminal in TERMINAL_STATES)
    best = answer.bests(connection, study)
    text = f"The best is trial {best[0].number}, {_values(best[0].values)}." if best else "No trial has a value."
    values = dict(best[0].values) if best else None
    if state in ("complete", "stopped"):
        title = f"study {name} is complete" if state == "complete" else f"study {name} has stopped"
        return Event(f"end/{state}/{num_ended}", "end", f"{title}: {num_ended} trials have ended", text, None, values)
    if state != "open" or driver is None:
        return None
    if event := lost(study, driver):
        return event
    text += f" `{command(f'resume --study {name}')}` goes on."
    return Event(f"interrupted/{driver.fence}", "end", f"study {name} was interrupted", text)


def lost(study: StudyRow, driver: LeaseRow) -> Event | None:
    """Returns the event that this driver was killed; None if it was not."""
    if not is_dead(driver.host, driver.pid, driver.pid_started):
        return None
    resumes = command(f"resume --study {study.name}")
    why = f"The process {driver.pid} on {driver.host} is dead; `{resumes}` goes on."
    return Event(f"driver/{driver.fence}", "lost", f"the driver of study {study.name} was lost", why)


def _note(study: str, number: int, note: EventRow) -> Event:
    where, fields = f"trial {number} of study {study}", note.fields
    name = f"{note.kind}/{note.uid}"
    if note.kind == _SPIKE:
        text = f"At step {fields.get('step')} the loss was {fields.get('loss')}: {fields.get('action')}."
        return Event(name, "spike", f"the loss of {where} has jumped", text, number)
    if note.kind == _MEMORY:
        text = f"Its micro-batch is {fields.get('micro_batch_size')} from step {fields.get('step')} on."
        return Event(name, "oom", f"memory ran out in {where}", text, number)
    part, why = ("worker", fields.get("why")) if note.kind == _LOST else ("data worker", fields.get("reason"))
    return Event(name, "lost", f"the {part} of {where} was lost", str(why)[:_MOST], number)


def _failed(study: str, row: ChangedTrial) -> Event | None:
    """Returns the event of a trial that has failed or has run out of memory for good; None for other trials."""
    kind = "failure" if row.state == "failed" else "oom" if row.outcome == "out_of_memory" else ""
    if not kind:
        return None
    verb = "has failed" if kind == "failure" else "needs more memory than there is"
    title = f"trial {row.number} of study {study} {verb}"
    return Event(f"trial/{row.number}/{kind}", kind, title, (row.error or "")[:_MOST], row.number)


def _not_finite(
    study: str, rows: Sequence[ChangedTrial], ended: Sequence[ChangedTrial], values: Sequence[ValueRow]
) -> Iterator[Event]:
    """Yields one event per trial with a value that is not finite, skipped steps, or an end for that reason.

    Under fp16 skipped steps are normal, because overflows determine its loss scale.
    """
    half = {row.id for row in rows if ((row.config.get("train") or {}).get("precision")) == "fp16"}
    why: dict[int, str] = {row.id: row.error or "" for row in ended if row.outcome == "nonfinite"}
    for row_value in values:
        if row_value.value is None:
            why.setdefault(row_value.trial_id, f"{row_value.key} is NaN at step {row_value.step}.")
        elif row_value.trial_id not in half:
            why.setdefault(row_value.trial_id, f"{row_value.value:.0f} steps were skipped up to step {row_value.step}.")
    for row in rows:
        if row.id in why:
            title = f"values of trial {row.number} of study {study} are not finite"
            yield Event(f"trial/{row.number}/nan", "nan", title, why[row.id][:_MOST], row.number)


def _bests(connection: Connection, study: StudyRow, new: set[int]) -> Iterator[Event]:
    for best in answer.selected(connection, study):
        if best.number in new:
            title = f"trial {best.number} of study {study.name} is the best: {_values(best.values)}"
            params = ", ".join(f"{path}={value!r}" for path, value in best.params.items())
            yield Event(f"best/{best.number}", "best", title, params[:_MOST], best.number, best.values)


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {value:.6g}" for metric, value in values.items())
