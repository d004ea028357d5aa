"""Where trials were judged, against a reading of every report of theirs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from crafted import change_trial, open_crafted, put_trial

from hpo.ledger import judged, queries

OBJECTIVES = ("val/accuracy", "size")


def expected(curves: dict[str, list[float | None]], values: list[float | None], select: str) -> tuple[Any, ...] | None:
    """The first or the last epoch at which the objectives have these values, with all that was reported there."""
    metrics = [key for key in OBJECTIVES if key in curves][: len(values)]
    epochs = [at for at in range(len(curves["val/accuracy"])) if [curves[key][at] for key in metrics] == values]
    if not epochs:
        return None
    at = epochs[0] if select == "best" else epochs[-1]
    shown = sorted((key, math.nan if curve[at] is None else curve[at]) for key, curve in curves.items())
    return 10 * (at + 1), at + 1, shown


@pytest.mark.parametrize("select", ["last", "best"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_trial_is_judged_where_it_has_its_values(tmp_path, monkeypatch, select, count):
    """Values repeat within a trial and among trials, and some are missing."""
    monkeypatch.setattr(judged, "PAGE", 7)
    objectives = [{"metric": key, "direction": "maximize", "select": select} for key in OBJECTIVES[:count]]
    ledger = open_crafted(tmp_path / "ledger.db", objectives=objectives)
    draws, wanted = random.Random(1), {}
    for number in range(30):
        curves = {key: [draws.choice([0.1, 0.2, None]) for _ in range(6)] for key in (*OBJECTIVES, "val/loss")}
        metrics = {key: tuple(curves[key]) for key in ("size", "val/loss")}
        trial = put_trial(ledger, number, "complete", tuple(curves["val/accuracy"]), metrics=metrics)
        at = draws.randrange(6)
        values = [curves[key][at] for key in OBJECTIVES[:count]] if number else [0.7] * count
        change_trial(ledger, number, values=values)
        if (place := expected(curves, values, select)) is not None:
            wanted[trial] = place
    with ledger.read() as connection:
        study = queries.study_row(connection, "crafted")
        places = queries.judged(connection, study, queries.trial_rows(connection, study.id))
    read = {key: (place.step, place.epoch, sorted(place.metrics.items())) for key, place in places.items()}
    assert len(wanted) == 29 and repr(sorted(read.items())) == repr(sorted(wanted.items()))
    ledger.close()
