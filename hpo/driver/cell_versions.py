"""Names the versions of a study in a notebook: each edit of its cell makes a new study, `name`, `name.2`, ..."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpo.declaration import content
from hpo.declaration.code_digest import same
from hpo.declaration.study import Study
from hpo.door import NOTEBOOK
from hpo.ledger import queries
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import driver as driver_queries

DECLARED = "declared"  # the key of a study's environment for the digests of the fields that its cell declares


def declared(study: Study) -> dict[str, str]:
    """Returns the digest of each field that a study's cell declares; empty for a study that a file declares."""
    return content.declared(study) if study.reference.startswith(f"{NOTEBOOK}:") else {}


def name_of(connection: Connection, study: Study, *, allow_drift: bool) -> tuple[str, str]:
    """Returns the name of the study that has this cell's code, or a new name and a notice about the earlier study.

    If no trial has a value yet, the study keeps its name and starts again with the new code.
    """
    fields = declared(study)
    if not fields:
        return study.name, ""
    versions, taken = _versions(connection, study)
    code = content.code_sha256(study)
    for row in reversed(versions):
        if not _edited(row, code, fields):
            return row.name, ""
    if not versions:
        return study.name, ""
    newest = versions[-1]
    if allow_drift or driver_queries.without_value(connection, newest.id):
        return newest.name, ""
    number = 2
    while (name := f"{study.name}.{number}") in taken:
        number += 1
    edited = _edited(newest, code, fields)
    differs = f"the {' and '.join(edited)} of {study.name} {'is' if len(edited) == 1 else 'are'} not that"
    return name, (
        f"{differs} of study {newest.name!r}, so this is a new study, {name!r}: to go on with {newest.name!r}, run its "
        f"earlier cell again, or give name={newest.name!r} and allow_drift=True."
    )


def _versions(connection: Connection, study: Study) -> tuple[list[StudyRow], list[str]]:
    """Returns the rows of the study's versions, oldest first, and the names of all studies."""
    taken = queries.study_names(connection)
    version = re.compile(rf"{re.escape(study.name)}(?:\.(\d+))?")
    numbers = {name: int(match[1] or 1) for name in taken if (match := version.fullmatch(name))}
    rows = [queries.study_row(connection, name) for name in sorted(numbers, key=numbers.__getitem__)]
    return [row for row in rows if row.spec.reference == study.reference], taken


def _edited(row: StudyRow, code: Mapping[str, str], fields: Mapping[str, str]) -> list[str]:
    """Returns the fields in which a cell differs from a study's cell; `code` if only the function's code differs."""
    before = row.environment.get(DECLARED, fields)  # a study of an earlier release has only the code
    edited = sorted(name for name in before.keys() & fields.keys() if before[name] != fields[name])
    known: Mapping[str, str] = row.identity.get("code", {})
    equal = known.keys() == code.keys() and all(same(known[label], code[label]) for label in code)
    return edited or ([] if equal else ["code"])
