"""Names the command that continues an interrupted study."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from hpo.ledger import queries
from hpo.ledger.answer import confirming, confirms
from hpo.ledger.finished import phase_of, phases_of
from hpo.ledger.rows import StudyRow
from hpo.search.confirming import NONE, parse
from hpo.text import command


def continuing(connection: Connection, study: StudyRow) -> str:
    """Returns the command that continues a study.

    Of a phase after a search this is the command that resumes the search, and of a race that `hpo confirm` has begun it
    is `hpo confirm`: only they know which rounds are to come.
    """
    spec = study.spec
    source = queries.find_study(connection, spec.listed_of) if spec.listed_of else None
    if source is None or source.id > study.id:
        return command(f"resume --study {study.name}")
    race = parse(spec.confirm) if confirms(spec.listed) else None
    by_search = race is None and source.spec.confirm != NONE
    if study.name == phase_of(source.name) or (study.name in phases_of(source.name) and by_search):
        return command(f"resume --study {source.name}")
    if race is None:
        return command(f"resume --study {study.name}")
    return confirming(source.name, study.name, race)
