"""What `hpo confirm` says below its table."""

from __future__ import annotations

from hpo.analysis.follow_up.confirm import Confirmation, Confirmed, notes
from hpo.analysis.follow_up.derived_study import Spread

NO_LUCK = "no value differs between the seeds: the training does not use its seed, so luck is not measured"


def found(*values: list[float]) -> Confirmation:
    rows = [Confirmed(number, False, 0.5, Spread.of(seeds), None, 0) for number, seeds in enumerate(values)]
    return Confirmation("s", "s-confirm", "loss", None, rows, [0], None, None)


def test_seeds_that_change_nothing_are_said_to_measure_nothing():
    assert NO_LUCK in notes(found([0.25, 0.25], [0.5, 0.5 + 1e-16]), several=False)
    assert NO_LUCK not in notes(found([0.25, 0.25], [0.5, 0.51]), several=False)
    assert NO_LUCK not in notes(found([0.25], [0.5]), several=False), "one seed has no spread"
