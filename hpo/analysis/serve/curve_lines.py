"""Reads curves that a study's page does not hold, of any metric and over epochs, steps or time, on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.curves import chosen, rounded, thin
from hpo.errors import UserError
from hpo.ledger import queries
from hpo.ledger.names import MAX_METRIC
from hpo.ledger.views import live as live_queries

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection

AXES = ("epoch", "step", "time")


@dataclass(frozen=True)
class Asked:
    """A request for curves: the metric and their axis."""

    metric: str
    along: str


def asked(given: Mapping[str, str]) -> Asked:
    """Returns the request in the parameters of an address. Raises UserError."""
    metric, along = given.get("metric", ""), given.get("along", "epoch")
    if not 0 < len(metric) <= MAX_METRIC:
        raise UserError(f"metric has {len(metric)} characters: name one of the study's.")
    if along not in AXES:
        raise UserError(f"along {along[:20]!r} is not known: give {', '.join(AXES)}.")
    return Asked(metric, along)


def lines(ledger: Ledger, study: str, of: Asked) -> dict[int, list[list[float | None]]]:
    """Returns number -> positions on the axis and values, for as many trials as a report holds.

    `time` is in seconds since the trial began. Raises StudyError, and UserError for a metric that none of them has
    reported.
    """

    def body(connection: Connection) -> dict[int, list[tuple[float, float]]]:
        row = queries.study_row(connection, study)
        placed = {number: rank for number, (_, rank) in queries.ranks(connection, row).items()}
        numbers = [trial.number for trial in live_queries.moved(connection, row.id, 0, [])]
        by_trial: dict[int, list[tuple[float, float]]] = {}
        points = list(live_queries.points(connection, row.id, chosen(numbers, placed), of.metric))
        if not points:
            raise live_queries.unreported(connection, row, of.metric)
        for point in points:
            if (x := _x(point, of.along)) is not None:
                by_trial.setdefault(point.number, []).append((x, point.value))
        return by_trial

    curves: dict[int, list[list[Any]]] = {}
    for number, points in ledger.look(body).items():
        shown = thin(points)
        curves[number] = [[x for x, _ in shown], [rounded(value) for _, value in shown]]
    return curves


def _x(point: live_queries.Point, along: str) -> float | None:
    return {"epoch": point.epoch, "step": point.step, "time": round(point.seconds, 2)}[along]
