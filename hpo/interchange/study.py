"""Writes an imported study into the home's ledger, or adds its new trials, in one transaction."""

from __future__ import annotations

import json
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpo.declaration.imported import REFERENCE, dimension, stored
from hpo.declaration.naming import check_name
from hpo.declaration.spec import StudySpec
from hpo.door import option
from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point, by_key
from hpo.interchange.rows import row
from hpo.interchange.space import merged, space_of
from hpo.interchange.texts import as_json, as_number, as_time
from hpo.ledger import Ledger, imports, queries
from hpo.ledger.database.json import plain, text
from hpo.ledger.names import MAX_METRIC
from hpo.ledger.rows import StudyRow
from hpo.space.objective import Constraint
from hpo.storage.home import Home
from hpo.text import counted
from hpo.tracking.uri import tracker_name
from trainer.quote import quoted


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    added    the number of new trials
    trials   the number of all trials
    left     what was not imported, a clause each
    guessed  what had to be guessed, a clause each
    """

    name: str
    added: int
    trials: int
    states: Mapping[str, int]
    left: Sequence[str]
    guessed: Sequence[str]

    def describe(self) -> str:
        """Returns the result in a few lines."""
        states = ", ".join(f"{count} {state}" for state, count in self.states.items() if count)
        lines = [
            f"study {self.name}: {counted(self.added, 'new trial')} of {self.trials}{f' ({states})' * bool(states)}"
        ]
        lines += [f"guessed: {clause}" for clause in self.guessed]
        lines += [f"not carried: {clause}" for clause in self.left]
        return "\n  ".join(lines)


def checked(found: ImportedStudy, name: str | None) -> tuple[str, ImportedStudy]:
    """Returns the study's name here, and the study with its trials in the form that the ledger takes.

    Raises UserError, before anything is written, if it cannot be written.
    """
    label = text(str(found.label))
    name = check_name(name or _name_of(label))
    _check_names(found)
    plainly = [_plain(trial, found) for trial in found.trials]
    if not plainly:
        raise UserError(f"{found.source}: {label!r} has no trial that has ended, so there is nothing to import.")
    attributes = _json(found.attributes, f"{found.source}, its notes")
    trials = list(by_key(plainly, found.source).values())
    return name, replace(found, label=label, attributes=attributes, trials=trials)


def _plain(trial: ImportedTrial, found: ImportedStudy) -> ImportedTrial:
    """Returns the trial in the ledger's form: values as JSON, times within the calendar's years. Raises UserError."""
    where = f"{found.source}, trial {trial.key}"
    if trial.values and len(trial.values) != len(found.objectives):
        raise UserError(
            f"{where} has {counted(len(trial.values), 'value')} for {counted(len(found.objectives), 'objective')}: "
            "restore the source, or leave the trial out."
        )
    return replace(
        trial,
        key=text(str(trial.key)),
        params=plain({str(name): _json(value, f"{where}, parameter {name}") for name, value in trial.params.items()}),
        values=trial.values and [_number(value, f"{where}, a value of it,") for value in trial.values],
        curves={
            str(metric): [
                Point(step, _number(value, f"{where}, metric {metric}"), as_time(at)) for step, value, at in points
            ]
            for metric, points in trial.curves.items()
        },
        constraints={
            str(name): _number(value, f"{where}, constraint {name}") for name, value in trial.constraints.items()
        },
        started=as_time(trial.started),
        ended=as_time(trial.ended),
        error=text(str(trial.error)),
        attributes=_json(trial.attributes, f"{where}, its notes"),
        exact=_json(trial.exact, f"{where}, its notes"),
    )


def _json(value: object, where: str) -> Any:
    try:
        return as_json(value)
    except ValueError as error:
        raise UserError(f"{where}: {error}: make it flat, or leave it out.") from error


def _number(value: object, where: str) -> float:
    number = as_number(value)
    if number is None:
        raise UserError(
            f"{where} is {quoted(value)}: it must be a number, so restore the source or leave the trial out."
        )
    return number


def import_study(found: ImportedStudy, ledger: Ledger, home: Home, tracking_uri: str, name: str) -> Imported:
    """Writes a study that `checked` has returned into the ledger. If it raises UserError, nothing was written.

    A study of that name that was imported under the same label gets the trials that it does not have yet.
    """
    with ledger.read() as connection:
        before = queries.find_study(connection, name)
        known = imports.records(connection, before.id) if before and before.spec.imported else {}
    _check_same(before, name, found)
    new = [trial for trial in found.trials if trial.key not in known]
    spec, guessed = _specification(found, name, new, before)
    study = _row(found, spec, home, tracking_uri, before)
    constraints, now = [Constraint(**described) for described in spec.constraints], time.time()
    rows = [row(trial, found.tool, found.objectives, constraints, now) for trial in new]
    old = before.spec.json if before else None
    added = ledger.transact(lambda connection: imports.add(connection, study, rows, old))
    with ledger.read() as connection:
        states = queries.status(connection, name).trials
    left = [*found.left, *_uncarried(new)]
    return Imported(name, added, sum(states.values()), states, left, [*found.guessed, *guessed])


def renamed(found: ImportedStudy, names: Mapping[str, str]) -> ImportedStudy:
    """Returns the study with parameters and metrics renamed, old -> new. Raises UserError for unknown names."""
    known = {
        name for trial in found.trials for part in (trial.params, trial.curves, trial.constraints) for name in part
    }
    known |= {objective.metric for objective in found.objectives}
    for old in names:
        if old not in known:
            raise UserError(
                f"{option('rename')} {old}={names[old]}: {found.source} has {', '.join(sorted(known))}, not {old}."
            )
    objectives = tuple(
        replace(objective, metric=names.get(objective.metric, objective.metric)) for objective in found.objectives
    )
    return replace(
        found, objectives=objectives, trials=[_renamed(trial, names, found.source) for trial in found.trials]
    )


def _renamed(trial: ImportedTrial, names: Mapping[str, str], source: str) -> ImportedTrial:
    def part(values: Mapping[str, object]) -> dict[str, Any]:
        new = {names.get(name, name): value for name, value in values.items()}
        if len(new) < len(values):
            raise UserError(
                f"{option('rename')}: two names of trial {trial.key} of {source} would be one: rename one of them."
            )
        return new

    exact = {key: part(value) if key in ("params", "distributions") else value for key, value in trial.exact.items()}
    return replace(
        trial,
        params=part(trial.params),
        dimensions=part(trial.dimensions),
        curves=part(trial.curves),
        constraints=part(trial.constraints),
        exact=exact,
    )


def _name_of(label: str) -> str:
    """Returns the label as a study's name; other characters become hyphens."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-._")[:64].rstrip(".") or "imported"


def _check_same(before: StudyRow | None, name: str, found: ImportedStudy) -> None:
    """Raises UserError if another study has the name already."""
    if before is None:
        return
    origin = before.spec.imported
    if not origin:
        raise UserError(
            f"study {name!r} of this home was not imported: give the import another name by {option('name')}."
        )
    if (origin["tool"], origin["label"]) != (found.tool, found.label):
        raise UserError(
            f"study {name!r} was imported from {origin['tool']} {origin['label']!r}, and not from {found.tool} "
            f"{found.label!r}: give this import another name by {option('name')}."
        )
    judged = [objective.to_json() for objective in found.objectives]
    if before.spec.objectives != judged:
        known, now = (
            ", ".join(f"{objective['direction']} {objective['metric']}" for objective in objectives)
            for objectives in (before.spec.objectives, judged)
        )
        raise UserError(
            f"study {name!r} is judged by {known}, and this import by {now}: give it another name by {option('name')}."
        )


def _specification(
    found: ImportedStudy, name: str, new: Sequence[ImportedTrial], before: StudyRow | None
) -> tuple[StudySpec, list[str]]:
    """Returns the study's specification including the new trials, and the guesses about its space."""
    space, observed = space_of([trial.params for trial in new], [trial.dimensions for trial in new])
    described = {path: stored(dimension) for path, dimension in space.items()}
    origin: dict[str, Any] = {"tool": found.tool, "label": found.label, "source": found.source}
    constraints = dict.fromkeys(path for trial in new for path in trial.constraints)
    if before is not None:
        earlier = before.spec.imported or {"space": {}, "observed": []}
        for path, old in earlier["space"].items():
            described[path] = stored(merged([dimension(old), space[path]])) if path in space else old
        observed = [*dict.fromkeys([*earlier["observed"], *observed])]
        constraints = dict.fromkeys([*(old["metric"] for old in before.spec.constraints), *constraints])
    origin |= {"space": described, "observed": observed, "attributes": json.dumps(dict(found.attributes))}
    spec = StudySpec(
        reference=f"{REFERENCE}{name}",
        name=name,
        sampler="imported",
        strategy={"name": "none"},
        order="async",
        window=1,
        objectives=[objective.to_json() for objective in found.objectives],
        constraints=[Constraint(metric, upper=0.0).to_json() for metric in constraints],
        metrics=["*"],
        imported=origin,
    )
    guess = f"the space of {', '.join(observed)} from the values that were tried"
    return spec, [guess] if observed else []


def _row(
    found: ImportedStudy, spec: StudySpec, home: Home, tracking_uri: str, before: StudyRow | None
) -> dict[str, Any]:
    """Returns the study's row, which is complete from the start so that no driver takes it."""
    now = time.time()
    begun = min((trial.started for trial in found.trials if trial.started is not None), default=now)
    environment = {"host": socket.gethostname(), "home": str(home.root), "tracking_uri": tracker_name(tracking_uri)}
    row = {"name": spec.name, "uid": before.uid if before else uuid.uuid4().hex, "created_at": begun}
    row |= {"state": "complete", "requested": len(found.trials), "spec": spec.to_json(), "identity": {}}
    return row | {"environment": environment, "seconds_used": 0.0}


def _check_names(found: ImportedStudy) -> None:
    """Raises UserError for a metric of an objective or constraint whose name is too long for the ledger."""
    judged = [objective.metric for objective in found.objectives]
    for metric in judged + [name for trial in found.trials for name in trial.constraints]:
        if len(metric) > MAX_METRIC:
            raise UserError(
                f"metric {metric[:40]}... has {len(metric)} characters: give it {MAX_METRIC} by {option('rename')}."
            )


def _uncarried(trials: Sequence[ImportedTrial]) -> list[str]:
    """Returns what the ledger cannot hold, a clause each."""
    long = sorted({metric[:40] for trial in trials for metric in trial.curves if not 0 < len(metric) <= MAX_METRIC})
    return [f"metrics with names over {MAX_METRIC} characters: {', '.join(long)}"] if long else []
