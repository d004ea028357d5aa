"""Reads the stopped trials that were better, when they stopped, than the study's answer.

A trial that waits at a rung of a study that has ended counts as stopped there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.analysis.results.extended import extended
from hpo.declaration.imported import REFERENCE
from hpo.ledger import answer, queries
from hpo.ledger.finished import original, phase_of
from hpo.ledger.rows import StudyRow
from hpo.search.finishing import Parts, ahead, ahead_in_part
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection


@dataclass(frozen=True)
class Stopped:
    """A stopped trial.

    epoch    the epoch at which it stopped
    values   its values by metric, as judged up to there
    phase    the state of the end phase that has begun to train it to its end; None if none has
    """

    number: int
    epoch: int
    values: dict[str, float]
    phase: str | None = None


def stopped_ahead(connection: Connection, study: StudyRow) -> list[Stopped]:
    """Returns the stopped trials whose values were better than the study's answer, best first.

    With several objectives these are the trials that no other trial, complete or stopped, dominates. Trials that break
    a constraint do not count, nor do those that another trial or `hpo extend` has trained on since. A trial with folds
    or seeds is compared over the ones that it has trained. An imported study has none, since its trials cannot be
    trained here.
    """
    if study.spec.reference.startswith(REFERENCE):
        return []
    objectives, rows = study.spec.objectives, queries.trial_rows(connection, study.id)
    trained_on = {row.parent for row in rows}
    stopped = ("pruned",) if study.state == "open" else ("pruned", "paused")
    if any(row.state in stopped for row in rows):
        trained_on |= {extension.trial for extension in extended(connection, study.name)}
    pruned = {
        row.number: row
        for row in rows
        if row.state in stopped and row.values and None not in row.values
        if row.number not in trained_on and not any(beyond > 0 for beyond in row.violations or ())
    }
    if not pruned:
        return []
    values = {number: row.values for number, row in pruned.items() if row.values}
    metrics = [objective["metric"] for objective in objectives]
    complete, [first, *_] = answer.scored(connection, study), pruned.values()
    if TrialShape.of(queries.configs(connection, [first.id])[first.id]).parts == 1:
        numbers = ahead(objectives, complete, values)
    else:
        epoch_of = {number: row.epoch for number, row in pruned.items()}
        numbers = ahead_in_part(
            objectives, complete, values, epoch_of, _parts(connection, study.id, metrics, [*complete])
        )
    begun = _in_phase(connection, study) if numbers else {}
    return [
        Stopped(number, pruned[number].epoch, dict(zip(metrics, values[number], strict=True)), begun.get(number))
        for number in numbers
    ]


def _in_phase(connection: Connection, study: StudyRow) -> dict[int, str]:
    """Returns number -> state of the trials that the end phase of a study has begun and not ended."""
    phase = queries.find_study(connection, phase_of(study.name))
    if phase is None or phase.id < study.id:
        return {}
    state = "running" if queries.study_state(connection, phase) == "running" else "interrupted"
    rows = queries.trial_rows(connection, phase.id, removed=True)
    ended = {row.number for row in rows if row.state in TERMINAL_STATES}
    numbers = [original(entry["label"]) for at, entry in enumerate(phase.spec.listed) if at not in ended]
    return {number: state for number in numbers if number is not None}


def _parts(connection: Connection, study_id: int, metrics: Sequence[str], numbers: Sequence[int]) -> Parts:
    """Returns the values of these trials after each fold or seed that has a value for every metric."""
    reported: dict[int, dict[int, dict[str, float]]] = {}
    for number, key, _, epoch, value in queries.curves(connection, study_id, metrics, numbers) if numbers else ():
        if epoch is not None:
            reported.setdefault(number, {}).setdefault(epoch, {})[key] = value
    return {
        number: {epoch: [row[metric] for metric in metrics] for epoch, row in rows.items() if len(row) == len(metrics)}
        for number, rows in reported.items()
    }


def line(stopped: Sequence[Stopped], study: str) -> str:
    """Returns a sentence about these trials of a study, with the command that finishes the first; empty for none."""
    if not stopped:
        return ""
    first, others = stopped[0], len(stopped) - 1
    values = ", ".join(f"{metric} {value:.6g}" for metric, value in first.values.items())
    more = f", and {counted(others, 'more stopped trial')}" if others else ""
    if first.phase == "running":
        trains = f"study {phase_of(study)} trains it to its end now"
    elif first.phase:
        trains = f"`{command(f'resume --study {study}')}` goes on with its training to the end, which was interrupted"
    else:
        trains = f"`{command(f'extend {first.number} --study {study}')}` trains it to its end"
    return f"ahead of the best when it stopped: trial {first.number}, {values} at epoch {first.epoch}{more}; {trains}"


def at_the_end(undeclared: Sequence[tuple[str, int]]) -> tuple[str, str] | None:
    """Returns an observation about trials that stopped where complete ones end, and its remedy; None without any.

    undeclared  state and last epoch of each trial whose configuration has no number of epochs
    """
    last = max((epoch for state, epoch in undeclared if state == "complete"), default=0)
    late = sum(state == "pruned" and epoch >= last for state, epoch in undeclared) if last else 0
    if not late:
        return None
    return (
        f"{counted(late, 'trial')} stopped at epoch {last}, where complete ones end",
        f"if every trial has {last} epochs, declare num_epochs={last} in the study, and none is stopped at its last "
        "one",
    )
