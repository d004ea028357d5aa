"""Reads the stopped or waiting trials of a study that were trained to their end, as trials of a study derived from it.

The end phase of a search and `hpo extend` make such a study. Its results count for the original if the configuration,
the overrides and the objectives are the same; a trial that was given more epochs does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.engine import Connection

from hpo.ledger.database.tables import asks, studies, trials
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import StudyRow
from hpo.ledger.stored_spec import StoredSpec
from hpo.search.finishing import trained

RESUME_FROM = "train.resume_from"
_EXTENDED = re.compile(r"trial (\d+) extended")
_LISTED_OF = studies.c.spec["listed_of"].as_string()
# Excludes a study derived from an earlier study of the name, which has been deleted.
_DERIVED = select(studies).where(bindparam("name") == _LISTED_OF, studies.c.id > bindparam("of")).order_by(studies.c.id)
_STOPPED = (
    select(trials.c.number, trials.c["values"], trials.c.epoch, asks.c.params)
    .join(asks, asks.c.trial_id == trials.c.id)
    .where(trials.c.study_id == bindparam("study"), trials.c.state.in_(("pruned", "paused")), is_shown)
)
_COMPLETE = select(trials.c.number, trials.c["values"], trials.c.epoch).where(
    trials.c.study_id == bindparam("study"), trials.c.state == "complete", is_shown
)


@dataclass(frozen=True)
class Finished:
    """A stopped trial that trial `number` of `study` has trained to its end.

    values   the values that judge it since
    stopped  the epoch at which it was stopped
    epoch    the epoch at which it ended
    before   whether its values are of an epoch before it was stopped, since it is judged by its best
    """

    study: str
    study_id: int
    number: int
    values: list[float]
    stopped: int
    epoch: int
    before: bool = False

    def described(self) -> str:
        """Returns `trained to epoch 6 after it was stopped at epoch 2 (study s-finish, trial 0)`."""
        return (
            f"trained to epoch {self.epoch} after it was stopped at epoch {self.stopped} "
            f"(study {self.study}, trial {self.number})"
        )

    @property
    def trained_in(self) -> tuple[str, int] | None:
        """Returns the study and the trial whose training gave the values; None if it was the stopped trial itself."""
        return None if self.before else (self.study, self.number)


def label(number: int) -> str:
    """Returns the label, in the list of a derived study, of a trial that continues trial `number`."""
    return f"trial {number} extended"


def original(entry_label: str) -> int | None:
    """Returns the number of the trial that a trial with this label continues; None for another label."""
    match = _EXTENDED.fullmatch(entry_label)
    return int(match[1]) if match else None


def phase_of(study: str) -> str:
    """Returns the name of the study in which another study's end phase trains."""
    return f"{study}-finish"


def confirmed_in(study: str, *, by_fold: bool = False) -> str:
    """Returns the name of the study in which the best trials of another one train again under other seeds.

    by_fold  whether they train under each seed on another fold of the data
    """
    return f"{study}-confirm{'-folds' if by_fold else ''}"


def num_confirmed(connection: Connection, study: str) -> int:
    """Returns how many trainings the confirming phase of a study has listed, on other folds or not."""
    names = [confirmed_in(study), confirmed_in(study, by_fold=True)]
    of_study = select(studies.c.id).where(studies.c.name == study).scalar_subquery()
    specs = select(studies.c.spec).where(studies.c.name.in_(names), studies.c.id > of_study)
    return max((len(spec.get("listed", ())) for spec in connection.execute(specs).scalars()), default=0)


def phases_of(study: str) -> tuple[str, ...]:
    """Returns the names of the studies in which the phases after a search train."""
    return phase_of(study), confirmed_in(study), confirmed_in(study, by_fold=True)


def finished(connection: Connection, study: StudyRow) -> dict[int, Finished]:
    """Returns number -> training of the stopped trials that were trained to their end; the first of several counts."""
    rows = connection.execute(_DERIVED, {"name": study.name, "of": study.id}).mappings()
    derived = [row for row in map(StudyRow.of, rows) if _is_alike(row.spec, study.spec)]
    if not derived:
        return {}
    stopped = {row.number: row for row in connection.execute(_STOPPED, {"study": study.id})}
    objectives, ends = study.spec.objectives, dict[int, Finished]()
    for row in derived:
        for trial, number, params in _complete(connection, row):
            before = stopped.get(number)
            if before is None or before.params != params or number in ends:
                continue
            later = not before.values or None in before.values or trained(objectives, before.values, trial.values)
            values = trial.values if later else before.values
            trial_key = row.name, row.id, trial.number
            ends[number] = Finished(*trial_key, list(values), before.epoch, trial.epoch, not later)
    return ends


def trained_as(connection: Connection, study: StudyRow, number: int) -> tuple[str, int]:
    """Returns the study and number of the trial that decides a trial's value: itself, or the one that finished it."""
    end = finished(connection, study).get(number)
    return (end and end.trained_in) or (study.name, number)


def _is_alike(derived: StoredSpec, spec: StoredSpec) -> bool:
    """Returns whether a derived study trains and judges a configuration as the study itself does."""
    return (derived.overrides, derived.objectives) == (spec.overrides, spec.objectives)


def _complete(connection: Connection, row: StudyRow) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Yields the complete trials of a derived study that have all values.

    Each comes with the number of the trial that it continues, and its parameters.
    """
    listed = row.spec.listed
    for trial in connection.execute(_COMPLETE.order_by(trials.c.number), {"study": row.id}):
        index: int = trial.number
        number = original(listed[index]["label"]) if index < len(listed) else None
        if number is not None and trial.values and None not in trial.values:
            params: Mapping[str, Any] = listed[index]["params"]
            yield trial, number, {path: value for path, value in params.items() if path != RESUME_FROM}
