"""Finds the ledger and the study that a command means."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from hpo.declaration.naming import check_name
from hpo.errors import NoLedger, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.rows import RowMapping
from hpo.storage.home import Home
from hpo.terminal import print


def open_ledger(home: str, storage: str | None, *, upgrade: bool = False) -> tuple[Ledger, Home]:
    """The ledger of a home, or the one named, brought to this release if asked; NoLedger where there is none yet."""
    at = Home.at(home)
    return Ledger(storage or at.storage, create=False, upgrade=upgrade), at


def declaration(study: str, home: str, storage: str | None, given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where a study is declared, and what its configuration is to be besides: of one that only the ledger has by that
    name, as it was begun."""
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
        spec = StudySpec.from_json(queries.study_row(connection, study)["spec"])
    return spec.reference, {**spec.overrides, **given}


def study_names(ledger: Ledger, study: str | None) -> list[str]:
    """The study given, else all there are."""
    with ledger.read() as connection:
        return [queries.study_row(connection, study)["name"]] if study else queries.study_names(connection)


def open_study(
    home: str, storage: str | None, study: str | None, *, upgrade: bool = False, told: bool = True
) -> tuple[Ledger, str, Home]:
    """The ledger, and the study that is meant: the one named, else the only one that is derived from no other, of which
    the user is `told`.

    Studies that `confirm` and `ablate` derive from another never stand for it: without a name the other is meant.
    """
    ledger, at = open_ledger(home, storage, upgrade=upgrade)
    if study:
        return ledger, study_names(ledger, check_name(study))[0], at
    where = ledger.shown if storage else at.root
    with ledger.read() as connection:
        names, derived = queries.study_names(connection), queries.derived(connection)
    own = [name for name in names if name not in derived] or names
    if not own:
        raise _no_study(where)
    if len(own) > 1:
        raise UserError(f"{where} holds {', '.join(names)}: name one with --study.")
    if told:
        _say(own[0], where, [name for name in names if name not in own])
    return ledger, own[0], at


def open_studies(
    home: str, storage: str | None, study: str | None, *, told: bool = True
) -> tuple[Ledger, list[str], Home]:
    """The ledger, and the study named, else all there are; UserError where there is none."""
    ledger, at = open_ledger(home, storage)
    names = study_names(ledger, study and check_name(study))
    where = ledger.shown if storage else at.root
    if not names:
        raise _no_study(where)
    if told and study is None and len(names) == 1:
        _say(names[0], where, [])
    return ledger, names, at


def own_first(home: str, storage: str | None, study: str | None) -> list[RowMapping]:
    """The rows of the study named, else of all there are, those derived from others last; none where there is no
    ledger, which only matters for a study that is named."""
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
    """Say which study is meant, where none was named."""
    others = f" beside {', '.join(beside)}, derived from it" if beside else ""
    print(f"study {name}, the only one in {where}{others}", file=sys.stderr)
