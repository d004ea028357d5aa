"""Search spaces: fixed coordinates, valid by construction, exact, refused in one sentence."""

import json
import math
from typing import Annotated, Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from rounds import rounds

from hpo import Bool, Choice, Float, Int
from hpo.errors import SpaceError
from hpo.space.config import apply, as_json, flatten
from hpo.space.config_check import check
from hpo.space.densities import densities
from hpo.space.space import Space


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sgd(Frozen):
    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0)
    momentum: float = 0.9
    nesterov: bool = False


class AdamW(Frozen):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)


class Model(Frozen):
    hidden_size: int = Field(64, ge=1)
    num_heads: int = Field(4, ge=1)
    ffn_size: int = Field(128, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    norm: Literal["layer", "rms"] | None = None


class Train(Frozen):
    optim: Annotated[Sgd | AdamW, Field(discriminator="name")] = AdamW()
    batch_size: int = 32


class Config(Frozen):
    train: Train = Train()
    model: Model = Model()


CONFIG = Config()
FULL = {
    "train.optim.lr": Float(1e-4, 1e-1, log=True),
    "train.optim.name": Choice(["sgd", "adamw"]),
    "train.optim.momentum": Float(0.0, 0.9, step=0.3, when={"train.optim.name": "sgd"}),
    "train.optim.nesterov": Bool(when={"train.optim.momentum": (0.3, 0.6, 0.9)}),
    "train.batch_size": Int(16, 256, powers_of_two=True),
    "model.num_heads": Int(1, 8, powers_of_two=True),
    "model.hidden_size": Int(16, 256, multiple_of="model.num_heads", log=True),
    "model.ffn_size": Int(16, 1024, multiple_of="model.hidden_size"),
    "model.dropout": Float(0.0, 0.5),
    "model.norm": Choice(["layer", "rms", None]),
}


def bound(dimensions, config=CONFIG):
    space = Space(dimensions)
    check(space, config)
    return space.bound(config)


units = st.lists(st.floats(0, 1), min_size=len(FULL), max_size=len(FULL))


@given(units)
@settings(max_examples=100, deadline=None)
def test_every_point_of_the_cube_is_a_valid_configuration(u):
    space = bound(FULL)
    coordinates = space.from_unit(u)
    params = space.decode(json.loads(json.dumps(coordinates)))
    assert params == space.decode(coordinates)
    config = apply(CONFIG, params)
    assert config.model.hidden_size % config.model.num_heads == 0
    assert config.model.ffn_size % config.model.hidden_size == 0
    assert ("train.optim.momentum" in params) == (params["train.optim.name"] == "sgd")
    assert ("train.optim.nesterov" in params) == (params.get("train.optim.momentum", 0.0) > 0)
    for path, value in params.items():
        assert flatten(as_json(config))[path] == value, "what was decided is what is trained, to the last bit"
        assert FULL[path].low <= value <= FULL[path].high if hasattr(FULL[path], "low") else True
    assert set(coordinates) == set(FULL) == set(space.coordinates), "a sampler always sees every dimension"


@st.composite
def dependent(draw):
    low = draw(st.integers(1, 200))
    high = draw(st.integers(low, 400))
    heads = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4, unique=True))
    return Int(low, high, multiple_of="model.num_heads", log=draw(st.booleans())), heads


@given(dependent(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_dependent_dimension_is_divisible_or_refused_when_declared(pair, u, v):
    dimension, heads = pair
    space = Space({"model.hidden_size": dimension, "model.num_heads": Choice(heads)})
    possible = all(any(k % n == 0 for k in range(dimension.low, dimension.high + 1)) for n in heads)
    if not possible:
        with pytest.raises(SpaceError, match=r"model\.hidden_size: no value in"):
            check(space, CONFIG)
        return
    check(space, CONFIG)
    params = space.bound(CONFIG).decode(space.from_unit([u, v]))
    assert params["model.hidden_size"] % params["model.num_heads"] == 0
    assert dimension.low <= params["model.hidden_size"] <= dimension.high


@pytest.mark.parametrize("log", [False, True])
def test_dependent_dimension_reaches_every_multiple(log):
    space = bound({"model.hidden_size": Int(10, 70, multiple_of="model.num_heads", log=log)})
    reached = {space.decode({"model.hidden_size": k / 4096})["model.hidden_size"] for k in range(4097)}
    assert reached == {k for k in range(10, 71) if k % CONFIG.model.num_heads == 0}


def test_dependent_dimension_follows_a_pinned_divisor():
    space = Space(FULL).pinned(["model.num_heads"])
    config = apply(CONFIG, {"model.num_heads": 6})
    check(space, config)
    space = space.bound(config)
    assert "model.num_heads" not in space.coordinates and space.fixed["model.num_heads"] == 6
    values = {space.decode(space.from_unit([k / 50] * len(space)))["model.hidden_size"] for k in range(51)}
    assert len(values) > 10 and all(value % 6 == 0 for value in values)


def test_inactive_divisor_leaves_the_field_its_own_value():
    dimensions = {
        "train.optim.name": Choice(["sgd", "adamw"]),
        "model.num_heads": Choice([3, 5], when={"train.optim.name": "sgd"}),
        "model.hidden_size": Int(4, 64, multiple_of="model.num_heads"),
    }
    space = bound(dimensions)
    for k in range(200):
        config = apply(CONFIG, space.decode(space.from_unit([k / 199, 0.5, (k * 7 % 200) / 199])))
        assert config.model.hidden_size % config.model.num_heads == 0
    with pytest.raises(SpaceError, match=r"multiple of model\.num_heads=100"):
        check(Space(dimensions), apply(CONFIG, {"model.num_heads": 100}))


def test_bound_space_drops_what_can_never_be_active():
    space = Space(FULL).pinned(["train.optim.name"])
    assert "train.optim.momentum" not in (adamw := space.bound(CONFIG)).paths
    assert "train.optim.nesterov" not in adamw.paths, "nor what hangs on it"
    sgd = space.bound(apply(CONFIG, {"train.optim.name": "sgd"}))
    assert "train.optim.momentum" in sgd.decode(sgd.from_unit([0.5] * len(sgd)))


def test_pinning_a_parent_pins_its_parts():
    assert Space(FULL).pinned(["train.optim"]).paths == tuple(
        p for p in sorted(FULL) if not p.startswith("train.optim")
    )


def test_declared_order_changes_nothing():
    reverse = Space(dict(reversed(FULL.items())))
    assert reverse.describe() == Space(FULL).describe() == json.loads(json.dumps(Space(FULL).describe()))
    assert reverse.coordinates == Space(FULL).coordinates
    u = [k / len(FULL) for k in range(len(FULL))]
    assert reverse.bound(CONFIG).decode(reverse.from_unit(u)) == bound(FULL).decode(Space(FULL).from_unit(u))


@given(st.floats(1e-8, 1e8), st.floats(1e-8, 1e8), st.booleans(), st.floats(0, 1))
def test_float_stays_within_its_bounds(a, b, log, u):
    dimension = Float(min(a, b), max(a, b), log=log)
    assert not list(dimension.faults())
    assert min(a, b) <= dimension.value(dimension.from_unit(u)) <= max(a, b)
    assert dimension.value(dimension.from_unit(0.0)) == pytest.approx(min(a, b), rel=1e-12)
    assert dimension.value(dimension.from_unit(1.0)) == pytest.approx(max(a, b), rel=1e-12)


def test_log_float_is_uniform_in_its_logarithm():
    dimension = Float(1e-4, 1e-1, log=True)
    for u in (0.1, 0.5, 0.77):
        assert dimension.from_unit(u) == pytest.approx(10 ** (-4 + 3 * u), rel=1e-12)


@pytest.mark.parametrize("log", [False, True])
def test_integer_cells_have_the_mass_they_should(log):
    dimension, n = Int(1, 8, log=log), 200_000
    drawn = [dimension.from_unit((k + 0.5) / n) for k in range(n)]
    span = math.log(8.5 / 0.5)
    for value in range(1, 9):
        expected = math.log((value + 0.5) / (value - 0.5)) / span if log else 1 / 8
        assert drawn.count(value) / n == pytest.approx(expected, abs=1e-4)


def test_steps_are_decimal_and_powers_are_powers():
    tenths = Float(0.0, 0.5, step=0.1)
    assert tenths.grid(5) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert tenths.value(0.1 + 0.2) == 0.3, "a sampler's rounding is undone"
    powers = Int(16, 256, powers_of_two=True)
    assert powers.coordinate == ("int", 4, 8, False, 1)
    assert sorted({powers.value(powers.from_unit(k / 99)) for k in range(100)}) == [16, 32, 64, 128, 256]
    assert Int(2, 32, powers_of_two=True, multiple_of="x").allowed(4) == [4, 8, 16, 32]


def brute_force_grid(space, points):
    """Every distinct decoding of the product of all axes, inactive dimensions and all."""
    found = set()

    def descend(coordinates, rest):
        if not rest:
            found.add(json.dumps(space.decode(coordinates), sort_keys=True))
            return
        dimension = space.dimensions[rest[0]]
        divisor = 1
        if dimension.divisor:
            divisor = space.decode({**space.from_unit([0.0] * len(space)), **coordinates})[dimension.divisor]
        for coordinate in dimension.grid(points, divisor):
            descend({**coordinates, rest[0]: coordinate}, rest[1:])

    descend({}, list(space.order))
    return found


@rounds("points", [1, 2, 3])
def test_grid_visits_every_distinct_configuration_once(points):
    kept = ("train.optim.name", "train.optim.momentum", "train.optim.nesterov", "model.num_heads", "model.hidden_size")
    space = bound({path: FULL[path] for path in (*kept, "model.dropout")})
    visited = [
        json.dumps(space.decode(space.grid(points).point(n)), sort_keys=True) for n in range(space.grid(points).size)
    ]
    assert len(set(visited)) == len(visited)
    assert set(visited) == brute_force_grid(space, points)
    with pytest.raises(IndexError):
        space.grid(points).point(len(visited))


def test_grid_of_nothing_is_one_point():
    assert Space({}).grid().size == 1 and Space({}).grid().point(0) == {}


@given(st.integers(1, 40), st.integers(0, 60), st.booleans(), st.integers(1, 9))
def test_grid_axis_of_integers_is_spread_and_distinct(low, width, log, points):
    dimension = Int(low, low + width, log=log)
    values = [dimension.value(coordinate) for coordinate in dimension.grid(points)]
    assert values == sorted(set(values)) and all(low <= value <= low + width for value in values)
    assert len(values) == width + 1 if width + 1 <= points else len(values) <= points
    assume(points > 1 and width > 0)
    assert values[0] == low and values[-1] == low + width


@rounds(
    ("dimensions", "words"),
    [
        ({"train.optim.rl": Float(0, 1)}, ["'train.optim.rl'", "did you mean", "'train.optim.lr'"]),
        ({"train.optim.lr": Float(2, 1)}, ["train.optim.lr", "low=2 is above high=1"]),
        ({"train.optim.lr": Float(0, 1, log=True)}, ["log needs low above 0"]),
        ({"train.optim.lr": Float(0, math.inf)}, ["high=inf", "finite"]),
        ({"train.optim.lr": Float(0, "1")}, ["high='1'"]),
        ({"train.optim.lr": Float(0, 1, step=0.3)}, ["step=0.3 does not lead from low=0 to high=1"]),
        ({"train.optim.lr": Float(0, 1, step=0)}, ["step=0 must be above 0"]),
        ({"train.optim.lr": Float(1, 2, step=1, log=True)}, ["log and step"]),
        ({"train.optim.lr": Float(-1, 1)}, ["-1.0", "greater than 0"]),
        ({"train.batch_size": Int(1, 10, step=4)}, ["step=4 does not lead"]),
        ({"train.batch_size": Int(1.5, 10)}, ["low=1.5 must be a whole number"]),
        ({"train.batch_size": Int(0, 10, log=True)}, ["log needs low of at least 1"]),
        ({"train.batch_size": Int(3, 8, powers_of_two=True)}, ["low=3 is not a power of two"]),
        ({"train.batch_size": Float(1, 2)}, ["train.batch_size", "1.0", "integer"]),
        ({"train.batch_size": 3}, ["3 is not a dimension"]),
        ({"train.optim.name": Choice([])}, ["options are empty"]),
        ({"train.optim.name": Choice("sgd")}, ["must be a list"]),
        ({"train.optim.name": Choice(["sgd", "sgd"])}, ["stands twice"]),
        ({"train.optim.name": Choice(["sgd", "adam"])}, ["'adam'", "'adamw'"]),
        ({"train.optim.name": Choice([object()])}, ["JSON"]),
        ({"model.dropout": Float(0, 1)}, ["model.dropout", "1.0", "less than 1"]),
        ({"model.dropout": Float(0, 0.5, when={"train.optim.nam": "sgd"})}, ["train.optim.nam", "did you mean"]),
        ({"model.dropout": Float(0, 0.5, when={"train.optim.name": "sdg"})}, ["train.optim.name='sdg'", "never holds"]),
        ({"model.dropout": Float(0, 0.5, when={"train.optim.name": ()})}, ["names no value"]),
        ({"model.dropout": Float(0, 0.5, tier=0)}, ["tier=0"]),
        ({"model.hidden_size": Int(5, 7, multiple_of="model.num_heads", step=2)}, ["step cannot be combined"]),
        ({"model.hidden_size": Int(5, 7, multiple_of="model.num_heads")}, ["no value in [5, 7]", "model.num_heads=4"]),
        ({"model.hidden_size": Int(5, 7, multiple_of="model.dropout")}, ["whole number from 1, not 0.0"]),
        ({"model.hidden_size": Int(5, 7, multiple_of="model.heads")}, ["unknown path 'model.heads'", "num_heads"]),
        ({"train.optim": Choice([{"name": "sgd"}]), "train.optim.lr": Float(1, 2)}, ["is a part of train.optim"]),
        (
            {
                "train.optim.name": Choice(["sgd", "adamw"]),
                "model.dropout": Float(0, 0.5, when={"train.optim.name": "adam"}),
            },
            ["'adam'", "did you mean 'adamw'"],
        ),
        (
            {
                "model.hidden_size": Int(1, 8, multiple_of="model.num_heads"),
                "model.num_heads": Int(1, 8, when={"model.ffn_size": 8}),
                "model.ffn_size": Int(1, 8, multiple_of="model.hidden_size"),
            },
            ["in a circle", "model.num_heads", "model.hidden_size", "model.ffn_size"],
        ),
    ],
)
def test_a_wrong_space_is_refused_naming_the_dimension(dimensions, words):
    with pytest.raises(SpaceError) as caught:
        check(Space(dimensions), CONFIG)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and message.endswith((".", "?"))


# --- Trials older than the space


OLDER = {
    "lr": Float(0.1, 1.0),
    "name": Choice(["sgd", "adamw", "lion"]),
    "momentum": Float(0.0, 0.9, when={"name": "sgd"}),
    "heads": Int(1, 8, powers_of_two=True),
    "hidden": Int(16, 128, multiple_of="heads"),
}
AT = {"lr": 0.5, "name": 0, "momentum": 0.4, "heads": 2, "hidden": 0.3}


@rounds(
    ("changes", "expected"),
    [
        ({}, AT),
        ({"wd": Float(0.0, 1.0)}, AT),
        ({"lr": Float(0.6, 1.0)}, {key: AT[key] for key in AT if key != "lr"}),
        ({"name": Choice(["lion", "sgd"])}, {**AT, "name": 1}),
        (
            {"name": Choice(["adamw", "lion"]), "momentum": Float(0.0, 0.9)},
            {key: AT[key] for key in AT if key != "name"},
        ),
        ({"heads": Int(1, 8)}, {key: AT[key] for key in AT if key != "heads"}),
        ({"hidden": Int(16, 64, multiple_of="heads")}, {key: AT[key] for key in AT if key != "hidden"}),
        ({"momentum": Float(0.0, 0.9, when={"name": "lion"})}, {key: AT[key] for key in AT if key != "momentum"}),
    ],
)
def test_of_an_older_trial_what_still_means_the_same_is_retained(changes, expected):
    params = json.loads(json.dumps(Space(OLDER).decode(AT)))
    assert Space(OLDER | changes).retained(AT, params) == expected


@given(u=st.lists(st.floats(0, 1), min_size=len(FULL), max_size=len(FULL)))
def test_a_trial_of_the_same_space_retains_all(u):
    space = Space(FULL).bound(CONFIG)
    at = json.loads(json.dumps(space.from_unit(u)))
    assert space.retained(at, json.loads(json.dumps(space.decode(at)))) == at


def test_an_inactive_coordinate_is_retained_while_it_is_inactive():
    at = AT | {"name": 1}
    params = Space(OLDER).decode(at)
    assert Space(OLDER).retained(at, params) == at
    active = Space(OLDER | {"momentum": Float(0.0, 0.9)}).retained(at, params)
    assert "momentum" not in active, "the trial had the configuration's value"


def test_one_and_true_are_two_options():
    assert Space({"x": Choice([True, 1])}).retained({"x": 0}, {"x": 1}) == {"x": 1}


@rounds(
    "dimension",
    [
        Float(-2.0, 3.0),
        Float(1e-4, 1e-1, log=True),
        Float(0.0, 0.9, step=0.1),
        Int(-3, 9),
        Int(2, 20, step=3),
        Int(1, 500, log=True),
        Int(1, 64, powers_of_two=True),
        Int(8, 64, multiple_of="heads"),
        Choice(["a", "b", "c"]),
    ],
)
def test_to_unit_is_where_from_unit_comes_from(dimension):
    for k in range(101):
        coordinate = dimension.from_unit(k / 100)
        again = dimension.from_unit(dimension.to_unit(coordinate))
        assert again == (pytest.approx(coordinate, rel=1e-12) if isinstance(coordinate, float) else coordinate)
    assert Float(2.0, 2.0).to_unit(2.0) == 0.5 and Float(2.0, 2.0, log=True).to_unit(2.0) == 0.5


# --- Values back to coordinates, priors, tiers


@given(st.lists(st.floats(0, 1), min_size=len(FULL), max_size=len(FULL)))
def test_encode_is_the_inverse_of_decode(u):
    space = Space(FULL).bound(CONFIG)
    u = u[: len(space)]
    params = space.decode(space.from_unit(u))
    middle = space.from_unit([0.5] * len(space))
    assert space.decode(space.encode(params, middle)) == params
    assert all(space.dimensions[path].holds(at) for path, at in space.encode(params, middle).items())


def test_encode_says_what_does_not_fit():
    momentum, n = Float(0.0, 0.9, when={"kind": "sgd"}), Int(1, 8, powers_of_two=True)
    space = Space({"kind": Choice(["sgd", "adamw"]), "momentum": momentum, "n": n, "x": Float(0.0, 1.0, step=0.25)})
    rest = space.from_unit([0.5] * 4)
    assert space.decode(space.encode({"n": 2}, rest))["n"] == 2
    for params, words in [
        ({"kind": "sgdd"}, "kind='sgdd' is not among the values that the space has there; did you mean 'sgd'"),
        ({"n": 10}, "n=10 is not among the values that the space has there: 1 to 8, powers of two."),
        ({"x": 0.3}, "x=0.3 is not among the values that the space has there: 0.0 to 1.0 in steps of 0.25."),
        ({"kind": 3}, "kind=3 is not among the values that the space has there: 'sgd', 'adamw'."),
        ({"n": 2.5}, "n=2.5 is not among"),
        ({"n": True}, "n=True is not among"),
        ({"kind": "adamw", "momentum": 0.5}, "momentum is not active there: it needs kind='sgd'"),
    ]:
        with pytest.raises(SpaceError) as caught:
            space.encode(params, rest)
        assert words in str(caught.value)
    assert space.encode({"kind": "adamw", "momentum": 0.5}, rest, strict=False)["kind"] == 1


@rounds(
    ("dimension", "near"),
    [
        (Float(1e-5, 1e-1, log=True, prior=1e-3, strength=0.8), lambda x: 10**-3.4 <= x <= 10**-2.6),
        (Float(0.0, 1.0, prior=1.0, strength=0.8), lambda x: x >= 0.9),
        (Int(0, 100, prior=20, strength=0.8), lambda x: 10 <= x <= 30),
        (Choice(["a", "b", "c", "d"], prior="c", strength=0.8), lambda x: x == 2),
    ],
)
def test_draws_gather_around_a_prior_as_often_as_its_strength_says(dimension, near):
    """Of a normal .683 lie within one standard deviation, and of the uniform rest its share."""
    drawn = [dimension.guided((k + 0.5) / 4000) for k in range(4000)]
    assert all(dimension.holds(at) for at in drawn)
    share, uniform = (
        sum(map(near, draws)) / 4000 for draws in (drawn, [dimension.from_unit((k + 0.5) / 4000) for k in range(4000)])
    )
    within = 1.0 if isinstance(dimension, Choice) else 0.683
    assert share == pytest.approx(0.8 * within + 0.2 * uniform, abs=0.04)


@rounds(
    "dimension",
    [
        Float(1e-5, 1.0, log=True, like="lr/sgd", strength=0.8),
        Float(0.01, 0.05, like="lr/sgd", strength=0.8),
        Float(0.0, 1.0, like="momentum/sgd", strength=0.8),
        Int(16, 64, log=True, like="batch_size/sgd", strength=0.8),
    ],
)
def test_draws_follow_a_density_within_the_range(dimension):
    """The share of draws below a value is that of the density, cut off at the ends, mixed with the uniform one."""
    density, count = densities()[dimension.like], 4000
    units = [(k + 0.5) / count for k in range(count)]
    drawn = [dimension.guided(u) for u in units]
    assert all(dimension.holds(at) for at in drawn)
    scaled = np.log(density.quantiles) if density.log else np.array(density.quantiles)

    def below(value):
        return np.interp(np.log(value) if density.log else value, scaled, np.linspace(0, 1, len(scaled)))

    for value in np.quantile(drawn, [0.1, 0.3, 0.5, 0.7, 0.9]) + (0.5 if isinstance(dimension, Int) else 0.0):
        cut = (below(value) - below(dimension.low)) / (below(dimension.high) - below(dimension.low))
        uniform = np.mean([dimension.from_unit(u) <= value for u in units])
        assert np.mean(np.array(drawn) <= value) == pytest.approx(0.8 * cut + 0.2 * uniform, abs=0.02)
    assert dimension.from_unit(dimension.centre) == pytest.approx(
        density.value((density.share(dimension.low) + density.share(dimension.high)) / 2), rel=0.02
    )


def test_a_dimension_without_a_prior_is_described_and_drawn_as_before():
    plain, led = Float(0.0, 1.0), Float(0.0, 1.0, prior=0.3)
    assert "prior" not in plain.describe() and led.describe()["prior"] == 0.3 and led.describe()["strength"] == 0.5
    assert [plain.guided(k / 7) for k in range(8)] == [plain.from_unit(k / 7) for k in range(8)]


@rounds(
    ("dimension", "words"),
    [
        (Float(0.0, 1.0, prior=2.0), "prior=2.0 is not among its values"),
        (Int(8, 64, powers_of_two=True, prior=12), "prior=12 is not among"),
        (Choice(["a"], prior="b"), "prior='b' is not among"),
        (Float(0.0, 1.0, prior=0.5, strength=0), "strength=0 must be above 0"),
        (Float(0.0, 1.0, strength=1.5), "strength=1.5 must be"),
        (Float(1e-4, 0.1, like="lr/sdg"), "x: like='lr/sdg' names no density: there are lr/sgd, "),
        (Float(1e-4, 0.1, like="lr/sdg"), "; did you mean 'lr/sgd'?"),
        (Float(1e-4, 0.1, like=3), "like=3 names no density"),
        (Float(1e-4, 0.1, like="lr/sgd", prior=0.01), "like='lr/sgd' and prior=0.01 cannot be combined; drop one"),
        (Choice([0.1, 0.2], like="lr/sgd"), "like='lr/sgd' is for numbers; drop it"),
        (Float(10, 20, like="momentum/sgd"), "has good values from .* to .* and none from 10 to 20; drop it or move"),
        (Float("a", 1, like="lr/sgd"), "low='a' must be a finite number"),
    ],
)
def test_priors_that_cannot_be_are_refused(dimension, words):
    with pytest.raises(SpaceError, match=words):
        Space({"x": dimension})


def test_a_tier_searches_the_dimensions_up_to_it():
    space = Space({"a": Float(0.0, 1.0), "b": Int(1, 3, tier=2), "c": Int(1, 3, tier=3)})
    assert [space.upto(tier).paths for tier in (1, 2, 3)] == [("a",), ("a", "b"), ("a", "b", "c")]
    with pytest.raises(SpaceError, match=r"tier 9 has no dimension: the highest of this space is 3\."):
        space.upto(9)
    with pytest.raises(SpaceError, match="tier 1 has no dimension: the lowest of this space is 2"):
        Space({"b": Int(1, 3, tier=2)}).upto(1)
