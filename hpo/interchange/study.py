"""Makes a study of the home of what a reader has found, or adds to it what is new; one transaction for each study."""

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
from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy, ImportedTrial, by_key
from hpo.interchange.rows import row
from hpo.interchange.space import merged, space_of
from hpo.ledger import Ledger, imports, queries
from hpo.ledger.json import plain, text
from hpo.ledger.names import MAX_METRIC
from hpo.ledger.rows import RowMapping
from hpo.space.objective import Constraint
from hpo.storage.home import Home
from hpo.text import counted
from hpo.tracking.uri import tracker_name


@dataclass(frozen=True)
class Imported:
    """What an import has done: the study's name, how many trials are new and how many there are, and what to tell."""

    name: str
    added: int
    trials: int
    states: Mapping[str, int]
    left: Sequence[str]
    guessed: Sequence[str]

    def describe(self) -> str:
        """In a few lines."""
        states = ", ".join(f"{count} {state}" for state, count in self.states.items() if count)
        lines = [
            f"study {self.name}: {counted(self.added, 'new trial')} of {self.trials}{f' ({states})' * bool(states)}"
        ]
        lines += [f"guessed: {one}" for one in self.guessed]
        lines += [f"not carried: {one}" for one in self.left]
        return "\n  ".join(lines)


def checked(found: ImportedStudy, name: str | None) -> tuple[str, ImportedStudy]:
    """The name that the study gets, and the study with its trials as the ledger takes them. Raises UserError where it
    cannot be written, before anything is."""
    name = check_name(name or _name_of(found.label))
    _check_names(found)
    plainly = [replace(one, key=text(one.key), params=plain(dict(one.params))) for one in found.trials]
    if not plainly:
        raise UserError(f"{found.source}: {found.label!r} has no trial that has ended, so there is nothing to import.")
    return name, replace(found, label=text(found.label), trials=list(by_key(plainly, found.source).values()))


def import_study(found: ImportedStudy, ledger: Ledger, home: Home, tracking_uri: str, name: str) -> Imported:
    """Write what `checked` has passed into the ledger. Raises UserError, and then nothing is written.

    A study of that name that was imported under the same label gets the trials that it has not.
    """
    with ledger.read() as connection:
        before = queries.find_study(connection, name)
        known = imports.records(connection, before["id"]) if before and before["spec"].get("imported") else {}
    _check_same(before, name, found)
    new = [trial for trial in found.trials if trial.key not in known]
    spec, guessed = _specification(found, name, new, before)
    study = _row(found, spec, home, tracking_uri, before)
    constraints, now = [Constraint(**one) for one in spec.constraints], time.time()
    rows = [row(trial, found.tool, found.objectives, constraints, now) for trial in new]
    old = before["spec"] if before else None
    added = ledger.transact(lambda connection: imports.add(connection, study, rows, old))
    with ledger.read() as connection:
        states = queries.status(connection, name).trials
    left = [*found.left, *_uncarried(new)]
    return Imported(name, added, sum(states.values()), states, left, [*found.guessed, *guessed])


def renamed(found: ImportedStudy, names: Mapping[str, str]) -> ImportedStudy:
    """The study with parameters and metrics called as `names` says, old -> new. Raises UserError for unknown ones."""
    there = {name for one in found.trials for part in (one.params, one.curves, one.constraints) for name in part}
    there |= {one.metric for one in found.objectives}
    for old in names:
        if old not in there:
            raise UserError(f"--rename {old}={names[old]}: {found.source} has {', '.join(sorted(there))}, not {old}.")
    objectives = tuple(replace(one, metric=names.get(one.metric, one.metric)) for one in found.objectives)
    return replace(
        found, objectives=objectives, trials=[_renamed(trial, names, found.source) for trial in found.trials]
    )


def _renamed(trial: ImportedTrial, names: Mapping[str, str], source: str) -> ImportedTrial:
    def part(values: Mapping[str, Any]) -> dict[str, Any]:
        new = {names.get(name, name): value for name, value in values.items()}
        if len(new) < len(values):
            raise UserError(f"--rename: two names of trial {trial.key} of {source} would be one: rename one of them.")
        return new

    exact = {key: part(one) if key in ("params", "distributions") else one for key, one in trial.exact.items()}
    return replace(
        trial,
        params=part(trial.params),
        dimensions=part(trial.dimensions),
        curves=part(trial.curves),
        constraints=part(trial.constraints),
        exact=exact,
    )


def _name_of(label: str) -> str:
    """The label as a study may be called; what cannot stand in a name becomes a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-._")[:64].rstrip(".") or "imported"


def _check_same(before: RowMapping | None, name: str, found: ImportedStudy) -> None:
    """Raise UserError where the name is taken by another study than the one that was found."""
    if before is None:
        return
    origin = before["spec"].get("imported")
    if not origin:
        raise UserError(f"study {name!r} of this home was not imported: give the import another name by --name.")
    if (origin["tool"], origin["label"]) != (found.tool, found.label):
        raise UserError(
            f"study {name!r} was imported from {origin['tool']} {origin['label']!r}, and not from {found.tool} "
            f"{found.label!r}: give this import another name by --name."
        )
    judged = [one.to_json() for one in found.objectives]
    if before["spec"]["objectives"] != judged:
        known, now = (
            ", ".join(f"{one['direction']} {one['metric']}" for one in them)
            for them in (before["spec"]["objectives"], judged)
        )
        raise UserError(
            f"study {name!r} is judged by {known}, and this import by {now}: give it another name by --name."
        )


def _specification(
    found: ImportedStudy, name: str, new: Sequence[ImportedTrial], before: RowMapping | None
) -> tuple[StudySpec, list[str]]:
    """The study's specification with the new trials in it, and what of its space was guessed."""
    space, observed = space_of([one.params for one in new], [one.dimensions for one in new])
    described = {path: stored(one) for path, one in space.items()}
    origin: dict[str, Any] = {"tool": found.tool, "label": found.label, "source": found.source}
    constraints = dict.fromkeys(path for one in new for path in one.constraints)
    if before is not None:
        earlier = before["spec"]["imported"]
        for path, one in earlier["space"].items():
            described[path] = stored(merged([dimension(one), space[path]])) if path in space else one
        observed = [*dict.fromkeys([*earlier["observed"], *observed])]
        constraints = dict.fromkeys([*(one["metric"] for one in before["spec"]["constraints"]), *constraints])
    origin |= {"space": described, "observed": observed, "attributes": json.dumps(dict(found.attributes))}
    spec = StudySpec(
        reference=f"{REFERENCE}{name}",
        name=name,
        sampler="imported",
        strategy={"name": "none"},
        order="async",
        window=1,
        objectives=[one.to_json() for one in found.objectives],
        constraints=[Constraint(metric, upper=0.0).to_json() for metric in constraints],
        metrics=["*"],
        imported=origin,
    )
    guess = f"the space of {', '.join(observed)} from the values that were tried"
    return spec, [guess] if observed else []


def _row(
    found: ImportedStudy, spec: StudySpec, home: Home, tracking_uri: str, before: RowMapping | None
) -> dict[str, Any]:
    """The study's row: complete from the beginning, so that no driver takes it."""
    now = time.time()
    begun = min((one.started for one in found.trials if one.started is not None), default=now)
    environment = {"host": socket.gethostname(), "home": str(home.root), "tracking_uri": tracker_name(tracking_uri)}
    row = {"name": spec.name, "uid": before["uid"] if before else uuid.uuid4().hex, "created_at": begun}
    row |= {"state": "complete", "requested": len(found.trials), "spec": spec.to_json(), "identity": {}}
    return row | {"environment": environment, "seconds_used": 0.0}


def _check_names(found: ImportedStudy) -> None:
    """Raise UserError for a metric that trials are judged by and the ledger has no place for."""
    judged = [one.metric for one in found.objectives] + [name for one in found.trials for name in one.constraints]
    for metric in judged:
        if len(metric) > MAX_METRIC:
            raise UserError(f"metric {metric[:40]}... has {len(metric)} characters: give it {MAX_METRIC} by --rename.")


def _uncarried(trials: Sequence[ImportedTrial]) -> list[str]:
    """What the ledger has no place for, a clause each."""
    long = sorted({metric[:40] for one in trials for metric in one.curves if not 0 < len(metric) <= MAX_METRIC})
    return [f"metrics with names over {MAX_METRIC} characters: {', '.join(long)}"] if long else []
