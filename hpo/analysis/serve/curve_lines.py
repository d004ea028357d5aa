"""Curves that a study's page does not hold: of any metric, over epochs or time, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.curves import chosen, rounded, thin
from hpo.errors import UserError
from hpo.ledger import live_queries, queries
from hpo.ledger.names import MAX_METRIC

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection

AXES = ("epoch", "step", "time")


@dataclass(frozen=True)
class Asked:
    """A metric, and what its curves go over."""

    metric: str
    along: str


def asked(given: Mapping[str, str]) -> Asked:
    """What the parameters of a request ask for. Raises UserError."""
    metric, along = given.get("metric", ""), given.get("along", "epoch")
    if not 0 < len(metric) <= MAX_METRIC:
        raise UserError(f"metric has {len(metric)} characters: name one of the study's.")
    if along not in AXES:
        raise UserError(f"along {along[:20]!r} is not known: give {', '.join(AXES)}.")
    return Asked(metric, along)


def lines(ledger: Ledger, study: str, of: Asked) -> dict[int, list[list[float | None]]]:
    """Number -> its places along the axis, and its values there; of as many trials as a report holds. `time` is in
    seconds since the trial began. Raises StudyError, and UserError for a metric that none of them has reported."""

    def body(connection: Connection) -> dict[int, list[tuple[float, float]]]:
        row = queries.study_row(connection, study)
        placed = {number: place for number, (_, place) in queries.places(connection, row).items()}
        there = [one.number for one in live_queries.moved(connection, row["id"], 0, [])]
        found: dict[int, list[tuple[float, float]]] = {}
        points = list(live_queries.points(connection, row["id"], chosen(there, placed), of.metric))
        if not points:
            raise live_queries.unreported(connection, row, of.metric)
        for point in points:
            if (x := _place(point, of.along)) is not None:
                found.setdefault(point.number, []).append((x, point.value))
        return found

    made: dict[int, list[list[Any]]] = {}
    for number, points in ledger.look(body).items():
        shown = thin(points)
        made[number] = [[x for x, _ in shown], [rounded(value) for _, value in shown]]
    return made


def _place(point: live_queries.Point, along: str) -> float | None:
    return {"epoch": point.epoch, "step": point.step, "time": round(point.seconds, 2)}[along]
