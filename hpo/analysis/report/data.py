"""Reads the one structure from which a report's page is made, for a file or a server.

It is plain JSON. The module that computes a part documents it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.analysis.report import snapshot
from hpo.analysis.report.answer import answer
from hpo.analysis.report.cautions import cautions
from hpo.analysis.report.certainty import sure
from hpo.analysis.report.cost import cost
from hpo.analysis.report.curves import curves
from hpo.analysis.report.environment import environment
from hpo.analysis.report.importances import importances
from hpo.analysis.report.next_steps import next_steps
from hpo.analysis.report.timeline import timeline
from hpo.analysis.report.trials import trials
from hpo.analysis.results import status as statuses
from hpo.analysis.results.differences import settings
from hpo.ledger import queries
from hpo.text import from_anywhere

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home


@dataclass(frozen=True)
class StudyReport:
    """A study as its report shows it.

    name         its name
    state        running, interrupted, complete or stopped
    status       its state and how many trials have ended, as in `hpo status`
    read_at      the time of reading, in seconds since 1970
    counts       {state: trials}, without removed ones
    removed      a sentence about the trials that are removed; empty for none
    objectives   [{"metric", "direction", "select"}]
    settings     {name: text}, the study's settings, for comparison with others
    """

    name: str
    state: str
    status: str
    read_at: float
    counts: dict[str, int]
    removed: str
    objectives: list[dict[str, Any]]
    settings: dict[str, str]
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
        """Returns the fields by name, without copying them."""
        return dict(vars(self))


def read(ledger: Ledger, home: Home, name: str, *, quick: bool = False) -> StudyReport:
    """Returns the study as it is now.

    While it runs, all parts except derived studies show one instant. A `quick` report lacks importances
    and the digest, which take most of the time if there are many trials. Raises StudyError if the ledger has no study
    of that name.
    """
    with from_anywhere(str(home.root.absolute())):
        with ledger.read() as connection:
            contents = snapshot.read(connection, name, digest=not quick)
            best, lines = answer(connection, home, contents), curves(connection, contents)
            shares = importances(connection, contents, shared=not quick)
        certainty = sure(ledger, name)
        warned = cautions(contents, certainty["confirm"], best["best"][0]["number"] if best["best"] else None)
        steps = next_steps(contents, best, certainty, warned)
    return StudyReport(
        name=name,
        **told(contents.status),
        read_at=contents.read_at,
        objectives=[dict(objective) for objective in contents.objectives],
        settings=settings(contents.study),
        answer=best,
        sure=certainty,
        trials=trials(contents),
        curves=lines,
        cost=cost(contents),
        importances=shares,
        timeline=timeline(contents),
        cautions=warned,
        next_steps=steps,
        environment=environment(contents),
    )


def changes(connection: Connection, report: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Returns the parts of an earlier report that have changed: its `state`, `status`, `counts` and `removed`.

    It adds the `trials` and `curves` of the trials in `numbers`, without their ranks.
    """
    if not numbers:
        return told(queries.status(connection, report["name"]))
    contents = snapshot.part(connection, report["name"], numbers)
    columns = {name: column for name, column in trials(contents, report).items() if name not in ("place", "front")}
    return {**told(contents.status), "trials": columns, "curves": curves(connection, contents, report["curves"])}


def told(status: queries.Status) -> dict[str, Any]:
    """Returns the progress of a study as JSON values."""
    gone = status.removed_cost
    shown = {state: count - gone.states.get(state, 0) for state, count in status.trials.items()}
    counts = {state: count for state, count in shown.items() if count}
    removed = statuses.removed_line(gone)
    return {"state": status.state, "status": statuses.progress(status), "counts": counts, "removed": removed}
