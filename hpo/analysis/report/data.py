"""The one structure from which a report's page is made, in a file or served.

All of it is plain JSON. Each part is documented in the module that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.analysis.report import snapshot
from hpo.analysis.report.answer import answer
from hpo.analysis.report.cautions import cautions
from hpo.analysis.report.cost import cost
from hpo.analysis.report.curves import curves
from hpo.analysis.report.environment import environment
from hpo.analysis.report.importances import importances
from hpo.analysis.report.next_steps import next_steps
from hpo.analysis.report.sure import sure
from hpo.analysis.report.timeline import timeline
from hpo.analysis.report.trials import trials
from hpo.analysis.results import status as statuses
from hpo.ledger import queries
from hpo.text import from_anywhere

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home


@dataclass(frozen=True)
class StudyReport:
    """A study as a report tells it.

    name         its name
    state        running, interrupted, complete or stopped
    status       how far it is, in a line, as `hpo status` has it
    read_at      when, in seconds since 1970
    counts       {state: trials}
    objectives   [{"metric", "direction", "select"}]
    """

    name: str
    state: str
    status: str
    read_at: float
    counts: dict[str, int]
    objectives: list[dict[str, Any]]
    answer: dict[str, Any]
    sure: dict[str, Any]
    trials: dict[str, Any]
    curves: dict[str, Any]
    cost: dict[str, Any]
    importances: dict[str, Any]
    timeline: dict[str, Any]
    cautions: list[dict[str, str]]
    next_steps: list[dict[str, str]]
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The fields by name; nothing is copied."""
        return dict(vars(self))


def read(ledger: Ledger, home: Home, name: str, *, quick: bool = False) -> StudyReport:
    """The study as it stands now; while it runs, all but importances and derived studies is of one instant.

    A `quick` one lacks importances and the digest, which take most of the time where trials are many.
    Raises StudyError where the ledger has none of that name.
    """
    with from_anywhere(str(home.root.absolute())):
        with ledger.read() as connection:
            of = snapshot.read(connection, name, digest=not quick)
            best, lines = answer(connection, home, of), curves(connection, of)
        found = sure(ledger, name)
        warned = cautions(of, found["confirm"])
        steps = next_steps(of, best, found, warned)
    return StudyReport(
        name=name,
        **told(of.status),
        read_at=of.read_at,
        objectives=[dict(one) for one in of.objectives],
        answer=best,
        sure=found,
        trials=trials(of),
        curves=lines,
        cost=cost(of),
        importances=importances(ledger, home, of, shared=not quick),
        timeline=timeline(of),
        cautions=warned,
        next_steps=steps,
        environment=environment(of),
    )


def changes(connection: Connection, report: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """What a report that was made before says now: its `state`, `status` and `counts`, and where there are `numbers`
    its `trials` and `curves` of these trials alone, without their places."""
    if not numbers:
        return told(queries.status(connection, report["name"]))
    of = snapshot.part(connection, report["name"], numbers)
    columns = {name: column for name, column in trials(of, report).items() if name not in ("place", "front")}
    return {**told(of.status), "trials": columns, "curves": curves(connection, of, report["curves"])}


def told(status: queries.Status) -> dict[str, Any]:
    """How far the study is."""
    counts = {state: count for state, count in status.trials.items() if count}
    return {"state": status.state, "status": statuses.line(status), "counts": counts}
