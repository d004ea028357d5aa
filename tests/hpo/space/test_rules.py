"""Rules between fields: read from text, kept to by construction where they are linear, and asked where they are not."""

import itertools
import json
import random
import re
from collections import Counter

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from hpo import Choice, Float, Int, Objective, Study
from hpo.declaration.content import identity
from hpo.errors import SpaceError
from hpo.search.samplers.registry import make_sampler
from hpo.space.config_check import check
from hpo.space.rules import parsed
from hpo.space.space import Space


def points(space, count, seed=0):
    """Coordinates at random points of the cube, some of them on its faces."""
    draw = random.Random(seed)
    return [space.from_unit([draw.choice([0.0, 1.0, *(draw.random() for _ in "abcd")]) for _ in space.paths])
            for _ in range(count)]  # fmt: skip


LINEAR = [
    ({"low": Float(0.0, 1.0), "high": Float(0.0, 1.0)}, ["low <= high"]),
    ({"low": Float(1e-5, 1.0, log=True), "high": Float(1e-3, 0.5, log=True)}, ["low < high"]),
    ({"z": Int(1, 900, log=True), "m": Int(1, 1000), "a": Int(2, 64, powers_of_two=True)}, ["a < m <= z"]),
    ({"a": Float(0.0, 1.0), "b": Float(0.0, 1.0), "c": Float(0.2, 1.0)}, ["a + b + c <= 1"]),
    ({"a": Float(0.0, 1.0), "b": Float(0.0, 1.0), "c": Float(0.0, 1.0)}, ["a + b + c == 1"]),
    ({"a": Float(0.0, 1.0, step=0.1), "b": Int(0, 10, step=5)}, ["10 * a - b / 2 >= 1.5"]),
    ({"warm": Int(0, 50), "total": Int(10, 100, step=10)}, ["2 * warm + 3 <= total"]),
]


@pytest.mark.parametrize(("dimensions", "rules"), LINEAR)
def test_a_linear_rule_holds_at_every_point_and_params_lead_back(dimensions, rules):
    space = Space(dimensions, rules=rules)
    assert not space.rejects
    middle = space.from_unit([0.5] * len(space))
    for coordinates in points(space, 500):
        params = space.decode(coordinates)
        assert not space.fault(params), params
        assert all(space.dimensions[path].set_relative(False).may_be(value) for path, value in params.items())
        assert space.decode(space.encode(params, middle)) == params


def test_all_configurations_in_order_can_be_drawn_and_no_other():
    """Held against all combinations, written out."""
    ranges = {"a": range(7), "b": range(0, 13, 3), "c": (1, 2, 4, 8)}
    dimensions = {"a": Int(0, 6), "b": Int(0, 12, step=3), "c": Int(1, 8, powers_of_two=True)}
    space = Space(dimensions, rules=["a <= b", "b < 2 * c"])
    right = {p for p in itertools.product(*ranges.values()) if p[0] <= p[1] < 2 * p[2]}
    grid = [space.decode(space.grid(99).point(number)) for number in range(space.grid(99).size)]
    assert Counter(tuple(p.values()) for p in grid) == Counter(right)
    assert {tuple(space.decode(at).values()) for at in points(space, 4000)} == right


def test_the_ends_of_a_range_are_reached_and_the_rest_is_uniform_there():
    space = Space({"high": Float(0.0, 2.0), "low": Float(0.0, 1.0)}, rules=["low <= high"])
    assert space.paths == ("high", "low"), "the one that stands first is drawn first"
    at = {u: space.decode({"high": 0.25, "low": u})["low"] for u in (0.0, 0.5, 1.0)}
    assert at == {0.0: 0.0, 0.5: 0.25, 1.0: 0.5}


def test_a_field_that_is_set_counts_and_an_inactive_one_does_not():
    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        kind: str = "a"
        low: float = 0.5
        high: float = 0.75

    dimensions = {"kind": Choice(["a", "b"]), "low": Float(0.0, 1.0), "high": Float(0.0, 1.0, when={"kind": "b"})}
    study = Study("s", Config(), "m:T", dimensions, [Objective("loss")], rules=["low <= high"])
    pinned = study.configure({"high": 0.25})
    assert {pinned.space.decode(at)["low"] <= 0.25 for at in points(pinned.space, 200)} == {True}
    whole = study.configure({}).space
    drawn = [whole.decode(at) for at in points(whole, 400)]
    assert all("high" in one or one["kind"] == "a" for one in drawn)
    assert any(one["low"] > 0.75 for one in drawn if one["kind"] == "a"), "where high is inactive nothing is asked"
    sampler = make_sampler("random", whole, [Objective("loss")], 0)
    asked = [whole.decode(sampler.ask(number).coordinates) for number in range(200)]
    assert all(one["low"] <= one["high"] for one in asked if "high" in one)


def test_a_grid_has_the_points_at_which_rules_hold_that_are_not_linear():
    space = Space({"dim": Int(1, 12), "heads": Int(1, 6)}, rules=["dim % heads == 0", "dim * heads <= 24"])
    right = {(d, h) for d in range(1, 13) for h in range(1, 7) if d % h == 0 and d * h <= 24}
    assert space.rejects
    grid = [tuple(space.decode(space.grid(99).point(number)).values()) for number in range(space.grid(99).size)]
    assert Counter(grid) == Counter(right)
    sampler = make_sampler("tpe", space, [Objective("loss")], 0)
    asked = {tuple(space.decode(sampler.ask(number).coordinates).values()) for number in range(len(right))}
    assert asked == right, "none is proposed twice while there are others"
    assert sampler.exhausted(len(right)) == f"the space has {len(right)} configurations, and each has been tried"


def test_rejection_draws_what_keeps_to_the_rule_uniformly():
    """Of the disk x^2 + y^2 <= 1 within the unit square: the mean radius is 2/3."""
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}, rules=["x ** 2 + y ** 2 <= 1"])
    sampler = make_sampler("random", space, [Objective("loss")], 5)
    radii = [sum(v * v for v in sampler.ask(number).coordinates.values()) ** 0.5 for number in range(2000)]
    assert max(radii) <= 1 and abs(sum(radii) / len(radii) - 2 / 3) < 0.02


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("low <=", "rule 'low <=' cannot be read: write it as in"),
        ("low + high", r"rule .low \+ high. compares nothing: write it"),
        ("1 < 2", "rule '1 < 2' names no field"),
        ("__import__('os').name == 'nt'", "may compare paths and numbers by"),
        ("low.__class__() <= high", "may compare paths and numbers by"),
        ("low <= hihg", "rule 'low <= hihg' names an unknown path 'hihg': .*did you mean 'high'"),
        ("low * high > 9", r"rule 'low \* high > 9' does not hold with low=.*at none of 256 points .* loosen it"),
        ("low > 1", r"rule 'low > 1' does not hold with low=.*at none of 256 points"),
        ("1 / (low - low) > 1", r"cannot be computed with low=.*\(ZeroDivisionError: "),
    ],
)
def test_a_rule_that_cannot_be_is_refused_in_one_sentence(rule, words):
    class Config(BaseModel):
        low: float = 0.0
        high: float = 0.0

    with pytest.raises(SpaceError, match=words) as caught:
        check(Space({"low": Float(0.0, 1.0), "high": Float(0.0, 1.0)}, rules=[rule]), Config())
    assert "\n" not in str(caught.value)


def test_mistakes_in_a_space_are_told_all_at_once():
    class Config(BaseModel):
        lr: float = 0.1
        width: int = 8
        name: str = "a"

    with pytest.raises(SpaceError) as caught:
        Space({"lr": Float(1.0, 0.1), "width": Int(0, 8, log=True), "name": Choice([])}, rules=["lr <"])
    assert str(caught.value).splitlines() == [
        "4 mistakes:",
        "  lr: low=1.0 is above high=0.1; swap them.",
        "  width: log needs low of at least 1, not 0.",
        "  name: options are empty; name at least one.",
        "  rule 'lr <' cannot be read: write it as in 'model.low <= model.high'.",
    ]
    wrong = Space({"lr": Float(0.1, 1.0), "widht": Int(1, 8), "name": Choice(["a", 3]), "deep": Int(1, 2)})
    with pytest.raises(SpaceError) as caught:
        check(wrong, Config())
    found = str(caught.value)
    assert found.startswith("3 mistakes:\n") and all(
        name in found for name in ("'widht'", "'deep'", "name: its value 3")
    )


def test_what_a_rule_says_does_not_depend_on_how_it_is_written():
    """Paths may hold numbers and resemble words; a text stays one."""
    rule = parsed("phase.2.lr / 2 <= and_more.max and not name == 'low <= 1'")
    assert rule.paths == ("phase.2.lr", "and_more.max", "name") and not rule.inequalities
    values = {"phase.2.lr": 4.0, "and_more.max": 2.0, "name": "x"}
    assert not rule.fault(values) and rule.fault(values | {"name": "low <= 1"})
    assert not rule.fault({"phase.2.lr": 4.0, "name": "x"}), "it names a field that is not there"


def test_rules_are_part_of_what_a_study_is():
    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        low: float = 0.0
        high: float = 1.0

        @model_validator(mode="after")
        def ordered(self):
            assert self.low <= self.high, "low is above high"
            return self

    space = {"low": Float(0.0, 1.0), "high": Float(0.0, 1.0)}
    plain = Study("s", Config(), "m:T", space, [Objective("loss")])
    ruled = Study("s", Config(), "m:T", space, [Objective("loss")], rules=["low <= high"])
    assert "rules" not in identity(plain) and identity(ruled)["rules"] == {"low <= high": True}
    study = ruled.configure({})
    assert all(study.resolved(study.space.decode(at))[1] == "" for at in points(study.space, 200))
    refused = plain.configure({}).resolved({"low": 0.75, "high": 0.5})
    assert refused[0] == {"low": 0.75, "high": 0.5} and re.search("low is above high", refused[1])
    assert json.dumps(refused[0])
