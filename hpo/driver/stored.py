"""Reads the ledger's data for a run of a study, once, before anything is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpo.declaration import imported
from hpo.declaration.loading import shipped
from hpo.declaration.naming import check_name
from hpo.declaration.references import is_unknown_cell, load, reference_file
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.driver import cell_versions, learn, tiers
from hpo.driver.learn import Lessons
from hpo.driver.request import RunRequest
from hpo.errors import StudyError
from hpo.ledger import Ledger, queries
from hpo.ledger.answer import confirms
from hpo.ledger.continuing import continuing
from hpo.ledger.removal import check_whole
from hpo.ledger.rows import Connection, StudyRow
from hpo.text import command


@dataclass(frozen=True)
class Stored:
    """The ledger's data about a study, under the name by which it will run.

    row       None if the study is new
    lower     the study of a lower tier from which it continues
    lessons   lessons from earlier studies; None if it keeps what it learned when it began
    notices   notices for the user about the name
    """

    name: str
    row: StudyRow | None = None
    lower: tiers.Below | None = None
    lessons: Lessons | None = None
    notices: tuple[str, ...] = ()

    @cached_property
    def spec(self) -> StudySpec | None:
        return None if self.row is None else StudySpec.from_json(self.row.spec.json)

    @property
    def environment(self) -> Mapping[str, Any]:
        """Returns the environment in which the study was last driven; empty for a new study."""
        return {} if self.row is None else self.row.environment


def read_study(ledger: Ledger | None, request: RunRequest, declared: Study | None) -> Stored:
    """Returns the stored data for the request, read in one transaction.

    Raises StudyError for a study that cannot be driven, or that is to be resumed and does not exist.
    """
    if ledger is not None:
        return ledger.look(lambda connection: _read(connection, request, declared))
    assert declared is not None
    return Stored(check_name(declared.name if request.study.name is None else request.study.name))


def _read(connection: Connection, request: RunRequest, declared: Study | None) -> Stored:
    name, notice = request.study.name, ""
    lower = tiers.below(connection, request, declared) if declared else None
    if name is None and lower:
        name = lower.name
    elif name is None:
        assert declared is not None
        name, notice = cell_versions.name_of(connection, declared, allow_drift=request.study.allow_drift)
    check_name(name)
    row = queries.find_study(connection, name) if declared else queries.study_row(connection, name)
    stored = Stored(name, row, lower, notices=(notice,) if notice else ())
    if row is not None:
        check_whole(row)
    if stored.spec and stored.spec.imported:
        raise imported.refuse(name)
    if row is not None and declared is None and (more := _rounds_to_come(connection, row)):
        return replace(stored, notices=(*stored.notices, more))
    return stored


def _rounds_to_come(connection: Connection, row: StudyRow) -> str:
    """Returns a notice on a race that is resumed by itself, since another command knows its rounds; else empty."""
    continues = continuing(connection, row)
    if row.state != "open" or not confirms(row.spec.listed) or continues == command(f"resume --study {row.name}"):
        return ""
    return f"only the present round of {row.name} is trained to its end: `{continues}` goes on with the others"


def with_lessons(ledger: Ledger | None, request: RunRequest, stored: Stored, study: Study) -> Stored:
    """Returns `stored` with the lessons that `study`, as it is configured, takes from earlier studies.

    A study that has begun learns again only if the request names other studies than before.
    """
    sources = learn.requested(request.search.learn_from, stored.spec)
    if sources is None or request.study.listed:
        return stored
    return replace(stored, lessons=learn.read(ledger, stored.name, study, sources))


def declaration(request: RunRequest, ledger: Ledger | None) -> Study | None:
    """Returns the requested declaration; None if the request leaves it to the ledger.

    Raises StudyError if it cannot be loaded, with the command that continues the ledger's study of that name, if any.
    """
    if (reference := request.study.reference) is None:
        return None
    try:
        return load(reference)
    except StudyError as error:
        if ledger is None or reference.endswith(".py") or reference in shipped():
            raise
        row = ledger.look(lambda connection: queries.find_study(connection, reference))
        if row is None:
            raise
        raise StudyError(
            f"no declaration is called {reference!r}; this ledger has a study of that name from "
            f"{row.spec.reference}: `{command(f'resume --study {reference}')}` continues it."
        ) from error


def declaration_of(spec: StudySpec) -> Study:
    """Returns the declaration of a study that has begun.

    Raises StudyError, which says how to continue the study, if its file has been moved or no cell declares it yet.
    """
    if is_unknown_cell(spec.reference):
        declared = spec.reference.partition(":")[2]
        raise StudyError(
            f"study {spec.name!r} is defined in a notebook, which no other process can import: run the cells that "
            f"declared {declared} when {spec.name!r} began, then `hpo.run({declared})` goes on with it there."
        )
    file = reference_file(spec.reference)
    if file is None or file.exists():
        return load(spec.reference)
    attribute = spec.reference.removeprefix(str(file))
    goes_on = command(f"run --study NEW_PLACE/{file.name}{attribute} --name {spec.name}")
    raise StudyError(
        f"{file}, the file of study {spec.name!r}, is not there any more: put it back, or `{goes_on}` goes on with it "
        "from where it lies now."
    )
