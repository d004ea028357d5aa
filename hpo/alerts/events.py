"""Finds in the ledger what is to be told, each event under a name that it has for ever.

A name is made of what happened, such as `trial/3/failed`, and not of when it was looked for: whoever is killed and
looks again finds the same event under the same name, and the ledger holds each name once for a target.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.ledger import alert_queries, mirror_queries, queries
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import Connection, RowMapping
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage.home import Home
from hpo.text import command, megabytes, spelled

_MOST = 1000  # characters of an error that are sent; `hpo show` has the rest
_SPIKE, _MEMORY, _LOST, _DATA = "loss_jumped", "out_of_memory", "worker_lost", "data_worker_lost"
NOTES = (_SPIKE, _MEMORY, _LOST, _DATA)  # events of trials that are told


@dataclass(frozen=True)
class Event:
    """`name` within the study, its `kind` of rules.EVENTS, the number of its trial, one line for people and more."""

    name: str
    kind: str
    title: str
    text: str = ""
    trial: int | None = None
    values: Mapping[str, Any] | None = None


def of_trials(connection: Connection, study: RowMapping, rows: Sequence[RowMapping]) -> list[Event]:
    """What has happened to trials since they were looked at; `rows` as `alert_queries.pending` gives them."""
    ids, found = [row["id"] for row in rows], list[Event]()
    numbers = {row["id"]: row["number"] for row in rows}
    for note in alert_queries.new_events(connection, ids, NOTES):
        found.append(_note(study["name"], numbers[note["trial_id"]], note))
    ended = [row for row in rows if row["state"] in TERMINAL_STATES and row["was"] not in TERMINAL_STATES]
    found += filter(None, (_failed(study["name"], row) for row in ended))
    found += _not_finite(study["name"], rows, ended, alert_queries.new_not_finite(connection, ids))
    if any(row["state"] == "complete" for row in ended):
        found += _bests(connection, study, {row["number"] for row in ended})
    return found


def target(study: RowMapping, best: Sequence[queries.Best], value: float) -> Iterator[Event]:
    """That the best value has reached `value`."""
    [objective] = study["spec"]["objectives"]
    sign = -1 if objective["direction"] == "maximize" else 1
    if best and sign * best[0].value <= sign * value:
        title = f"{objective['metric']} of study {study['name']} has reached {value:g}"
        text = f"trial {best[0].number} has {best[0].value:.6g}."
        yield Event(f"target/{value!r}", "target", title, text, best[0].number, best[0].values)


def full(study: RowMapping, home: Home, kept: int, share: float, run: int) -> Iterator[Event]:
    """That the home's disk, or what the checkpoints may take, is used up to `share`; once in each run of the study."""
    try:
        disk = shutil.disk_usage(home.root)
    except OSError as error:
        yield Event(f"disk/{run}", "disk", f"the home of study {study['name']} cannot be read", str(error))
        return
    if disk.total and 1 - disk.free / disk.total >= share:
        title = f"the disk of study {study['name']} is {1 - disk.free / disk.total:.0%} full"
        yield Event(f"disk/{run}", "disk", title, f"{megabytes(disk.free)} are free for {home.root}.")
    most = study["environment"].get("max_bytes")
    if most and kept / most >= share:
        title = f"the checkpoints of study {study['name']} take {kept / most:.0%} of --max-bytes"
        yield Event(f"quota/{run}", "disk", title, f"They take {megabytes(kept)} of {megabytes(most)}.")


def silence(study: RowMapping, seconds: float, revisions: int) -> Event:
    """That no trial has reported or ended for so long; `revisions` names what it has been quiet since."""
    title = f"study {study['name']} makes no progress"
    return Event(f"silence/{revisions}", "no_progress", title, f"No trial has reported for {spelled(seconds)}.")


def end(connection: Connection, study: RowMapping, driver: RowMapping | None) -> Event | None:
    """How a run of the study has ended, once nobody is left to say so; None where it goes on.

    A driver that was killed is lost; one that lives and lets this process leave is interrupted.
    """
    name, state = study["name"], study["state"]
    ended = sum(mirror_queries.counts(connection, study["id"]).get(one, 0) for one in TERMINAL_STATES)
    best = queries.bests(connection, study)
    text = f"The best is trial {best[0].number}, {_values(best[0].values)}." if best else "No trial has a value."
    values = dict(best[0].values) if best else None
    if state in ("complete", "stopped"):
        title = f"study {name} is complete" if state == "complete" else f"study {name} has stopped"
        return Event(f"end/{state}/{ended}", "end", f"{title}: {ended} trials have ended", text, None, values)
    if state != "open" or driver is None:
        return None
    if event := lost(study, driver):
        return event
    text += f" `{command(f'resume --study {name}')}` goes on."
    return Event(f"interrupted/{driver['fence']}", "end", f"study {name} was interrupted", text)


def lost(study: RowMapping, driver: RowMapping) -> Event | None:
    """That this driver was killed; None where it was not."""
    if not is_dead(driver["host"], driver["pid"], driver["pid_started"]):
        return None
    again = command(f"resume --study {study['name']}")
    why = f"The process {driver['pid']} on {driver['host']} is dead; `{again}` goes on."
    return Event(f"driver/{driver['fence']}", "lost", f"the driver of study {study['name']} was lost", why)


def _note(study: str, number: int, note: RowMapping) -> Event:
    at, fields = f"trial {number} of study {study}", note["fields"]
    name = f"{note['kind']}/{note['uid']}"
    if note["kind"] == _SPIKE:
        text = f"At step {fields.get('step')} the loss was {fields.get('loss')}: {fields.get('action')}."
        return Event(name, "spike", f"the loss of {at} has jumped", text, number)
    if note["kind"] == _MEMORY:
        text = f"Its micro-batch is {fields.get('micro_batch_size')} from step {fields.get('step')} on."
        return Event(name, "oom", f"memory ran out in {at}", text, number)
    what, why = ("worker", fields.get("why")) if note["kind"] == _LOST else ("data worker", fields.get("reason"))
    return Event(name, "lost", f"the {what} of {at} was lost", str(why)[:_MOST], number)


def _failed(study: str, row: RowMapping) -> Event | None:
    """Of a trial that has ended: a fault of the study or the machine, or memory that ran out for good."""
    kind = "failure" if row["state"] == "failed" else "oom" if row["outcome"] == "out_of_memory" else ""
    if not kind:
        return None
    how = "has failed" if kind == "failure" else "needs more memory than there is"
    title = f"trial {row['number']} of study {study} {how}"
    return Event(f"trial/{row['number']}/{kind}", kind, title, (row["error"] or "")[:_MOST], row["number"])


def _not_finite(
    study: str, rows: Sequence[RowMapping], ended: Sequence[RowMapping], values: Sequence[RowMapping]
) -> Iterator[Event]:
    """Once for each trial: a value that is none, steps that were skipped, or an end by it. Under fp16, whose scale is
    found by overflows, skipped steps are no news."""
    half = {row["id"] for row in rows if ((row["config"].get("train") or {}).get("precision")) == "fp16"}
    why: dict[int, str] = {row["id"]: row["error"] or "" for row in ended if row["outcome"] == "nonfinite"}
    for one in values:
        if one["value"] is None:
            why.setdefault(one["trial_id"], f"{one['key']} is NaN at step {one['step']}.")
        elif one["trial_id"] not in half:
            why.setdefault(one["trial_id"], f"{one['value']:.0f} steps were skipped up to step {one['step']}.")
    for row in rows:
        if row["id"] in why:
            title = f"values of trial {row['number']} of study {study} are not finite"
            yield Event(f"trial/{row['number']}/nan", "nan", title, why[row["id"]][:_MOST], row["number"])


def _bests(connection: Connection, study: RowMapping, new: set[int]) -> Iterator[Event]:
    for best in queries.bests(connection, study):
        if best.number in new:
            title = f"trial {best.number} of study {study['name']} is the best: {_values(best.values)}"
            params = ", ".join(f"{path}={value!r}" for path, value in best.params.items())
            yield Event(f"best/{best.number}", "best", title, params[:_MOST], best.number, best.values)


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {value:.6g}" for metric, value in values.items())
