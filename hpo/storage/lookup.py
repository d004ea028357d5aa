"""Finds the ledger and the study that a command refers to."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from hpo.declaration.naming import check_name
from hpo.door import option
from hpo.errors import NoLedger, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.rows import StudyRow
from hpo.space.assignments import NO_PRESET
from hpo.storage.home import Home
from hpo.terminal import print


def open_ledger(home: str, storage: str | None, *, upgrade: bool = False) -> tuple[Ledger, Home]:
    """Returns the ledger of a home, or the named one, upgraded if asked; raises NoLedger if there is none yet."""
    opened_home = Home.at(home)
    return Ledger(storage or opened_home.storage, create=False, upgrade=upgrade), opened_home


def declaration(
    study: str, home: str, storage: str | None, given: Mapping[str, object]
) -> tuple[str, Mapping[str, Any]]:
    """Returns the reference of a study's declaration and its overrides; a study known only to the ledger keeps its
    own."""
    from hpo.declaration.loading import shipped
    from hpo.declaration.spec import StudySpec

    if ".py" in study or study in shipped():
        return study, given
    try:
        ledger, _ = open_ledger(home, storage)
    except NoLedger:
        return study, given
    with closing(ledger), ledger.read() as connection:
        if study not in queries.study_names(connection):
            return study, given
        spec = StudySpec.from_json(queries.study_row(connection, study).spec.json)
    return spec.reference, given if "preset" in given else {"preset": NO_PRESET, **spec.overrides, **given}


def study_names(ledger: Ledger, study: str | None) -> list[str]:
    """Returns the given study's name, else all names."""
    with ledger.read() as connection:
        return [queries.study_row(connection, study).name] if study else queries.study_names(connection)


def open_study(
    home: str, storage: str | None, study: str | None, *, upgrade: bool = False, announced: bool = True
) -> tuple[Ledger, str, Home]:
    """Returns the ledger and the study: the named one, else the only one that is not derived from another.

    If the study was not named, prints its name unless `announced` is False. Studies that `confirm` and `ablate` derive
    are chosen only by name, unless the ledger has no others.
    """
    ledger, opened_home = open_ledger(home, storage, upgrade=upgrade)
    if study:
        return ledger, study_names(ledger, check_name(study))[0], opened_home
    where = ledger.shown if storage else opened_home.root
    with ledger.read() as connection:
        names, derived = queries.study_names(connection), queries.derived(connection)
    candidates = [name for name in names if name not in derived] or names
    if not candidates:
        raise _no_study(where)
    if len(candidates) > 1:
        raise UserError(f"{where} holds {', '.join(names)}: name one with {option('study')}.")
    if announced:
        _say(candidates[0], where, [name for name in names if name not in candidates])
    return ledger, candidates[0], opened_home


def open_studies(
    home: str, storage: str | None, study: str | None, *, announced: bool = True
) -> tuple[Ledger, list[str], Home]:
    """Returns the ledger and the study named, else all studies; raises UserError if none exists."""
    ledger, opened_home = open_ledger(home, storage)
    names = study_names(ledger, study and check_name(study))
    where = ledger.shown if storage else opened_home.root
    if not names:
        raise _no_study(where)
    if announced and study is None and len(names) == 1:
        _say(names[0], where, [])
    return ledger, names, opened_home


def own_first(home: str, storage: str | None, study: str | None) -> list[StudyRow]:
    """Returns the rows of the study named, else of all studies, derived ones last.

    Returns nothing if no study was named and the ledger does not exist; raises NoLedger for a named one.
    """
    try:
        ledger, _ = open_ledger(home, storage)
    except NoLedger:
        if study:
            raise
        return []
    with closing(ledger):
        names = study_names(ledger, study and check_name(study))
        with ledger.read() as connection:
            derived = queries.derived(connection)
            return [queries.study_row(connection, name) for name in sorted(names, key=lambda name: name in derived)]


def _no_study(where: object) -> UserError:
    return UserError(f"{where} holds no study: begin one with `hpo run`.")


def _say(name: str, where: object, beside: Sequence[str]) -> None:
    """Prints which study was chosen if none was named."""
    others = f" apart from {', '.join(beside)}, derived from it" if beside else ""
    print(f"study {name}, the only one in {where}{others}", file=sys.stderr)
