"""A start from what another study has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from hpo.config import flatten
from hpo.errors import SpaceError, UserError
from hpo.ledger import Ledger, reads
from hpo.ledger.tables import asks, trials
from hpo.search.sampler import TrialRecord, is_scored
from hpo.space import Space
from hpo.study import Study
from hpo.words import counted


def found(ledger: Ledger, name: str, study: Study) -> list[dict[str, Any]]:
    """The complete trials of study `name` that fit the space of `study`, as JSON: coordinates and values, in order.

    A trial fits whose configuration has, for every dimension that is active there, a value that the space holds.
    Raises UserError where the studies are judged by different metrics, or no trial fits.
    """
    with ledger.read() as connection:
        row = reads.study_row(connection, name)
        complete = (trials.c.study_id == row["id"]) & (trials.c.state == "complete")
        rows = connection.execute(
            select(trials.c["values"], asks.c.config)
            .join(asks, asks.c.trial_id == trials.c.id)
            .where(complete)
            .order_by(trials.c.number)
        ).all()
    judged = [(one["metric"], one["direction"]) for one in row["spec"]["objectives"]]
    if judged != [(one.metric, one.direction) for one in study.objectives]:
        raise UserError(
            f"--warm-start {name}: its trials are judged by {', '.join(' '.join(reversed(one)) for one in judged)}, "
            "and this study's are not; name one with the same objective."
        )
    fitting = [{"coordinates": at, "values": values} for values, config in rows if (at := _place(study.space, config))]
    if not (fitting := [one for one in fitting if is_scored(records([one])[0])]):
        raise UserError(
            f"--warm-start {name}: of its {counted(len(rows), 'complete trial')} none fits the space of this study."
        )
    return fitting


def records(earlier: list[dict[str, Any]], constraints: int = 0) -> list[TrialRecord]:
    """What `found` has found, as a sampler takes it: they keep to the constraints, being complete."""
    return [
        TrialRecord(number, "complete", one["coordinates"], tuple(one["values"] or ()), violations=(0.0,) * constraints)
        for number, one in enumerate(earlier)
    ]


def _place(space: Space, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a configuration lies in the space; None where it does not."""
    values = flatten(config)
    try:
        found = space.encode(values, space.from_unit([0.5] * len(space)), strict=False)
    except SpaceError:
        return None
    return found if all(values.get(path) == value for path, value in space.decode(found).items()) else None
