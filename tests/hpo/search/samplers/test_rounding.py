"""Rounding of proposals: to 8 significant digits, within the bounds, and told to the sampler that proposed."""

from __future__ import annotations

import pytest

from hpo import Choice, Float, Int, Objective
from hpo.search.samplers.base import Proposal
from hpo.search.samplers.registry import make_sampler
from hpo.search.samplers.rounding import RoundingSampler, rounded
from hpo.space.space import Space

SPACE = Space(
    {"lr": Float(1e-4, 1e-1, log=True), "n": Int(1, 9), "kind": Choice(["a", "b"]), "p": Float(0, 1, step=0.1)}
)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (("float", 0.0, 1.0, False, None), 0.123456789123, 0.12345679),
        (("float", 1e-5, 1.0, True, None), 0.0001234567812, 0.00012345678),
        (("float", 0.0, 0.123456784, False, None), 0.12345678399, 0.12345678),
        (("float", 0.0, 0.123456786, False, None), 0.1234567859, 0.123456786),  # 0.12345679 lies beyond
        (("float", 0.123456786, 1.0, False, None), 0.1234567861, 0.12345679),
        (("float", 0.0, 1.0, False, 0.1), 0.30000000000000004, 0.30000000000000004),
        (("unit",), 0.9999999999, 1.0),
        (("int", 1, 9, False, 1), 7, 7),
        (("choice", 3), 2, 2),
    ],
)
def test_a_continuous_coordinate_has_8_digits_within_its_bounds(kind, value, expected):
    assert rounded(kind, value) == expected


@pytest.mark.parametrize("name", ["tpe", "bohb", "cmaes", "freeze-thaw", "gp"])
def test_version_2_rounds_and_version_1_does_not(name):
    new, old = (
        make_sampler(name, SPACE, [Objective("loss")], 3, versions={f"sampler {name}": version}) for version in (2, 1)
    )
    proposal, before = new.ask(0).coordinates, old.ask(0).coordinates
    assert proposal["lr"] == float(f"{before['lr']:.7e}") != before["lr"]
    assert {path: proposal[path] for path in ("n", "kind", "p")} == {path: before[path] for path in ("n", "kind", "p")}
    newest = make_sampler(name, SPACE, [Objective("loss")], 3)
    assert newest.ask(0).coordinates == proposal


@pytest.mark.parametrize("name", ["random", "qmc", "grid", "nsga2"])
def test_a_sampler_that_does_not_compute_is_not_rounded(name):
    sampler = make_sampler(name, SPACE, [Objective("loss")], 3)
    assert not isinstance(sampler, RoundingSampler)


def test_the_sampler_knows_the_rounded_proposal():
    class Told:
        def __init__(self):
            self.adopted = []

        def ask(self, number):
            return Proposal({"lr": 0.0123456789123, "n": 3, "kind": 0, "p": 0.5}, seed=1, trial_attrs={"a": 1})

        def adopt(self, record):
            self.adopted.append(record)

    told = Told()
    proposal = RoundingSampler(told, SPACE).ask(4)
    [record] = told.adopted
    assert (record.number, record.coordinates, record.trial_attrs) == (4, proposal.coordinates, {"a": 1})
    assert proposal.coordinates["lr"] == 0.012345679
