"""Numbers of any type in a space: numpy's are Python's, equal ones are one option, and none is too large to list."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import optuna
import pytest
from pydantic import BaseModel, ConfigDict
from rounds import rounds

from hpo import Bool, Choice, Constraint, Float, Int, Objective, Study
from hpo.errors import SpaceError, UserError
from hpo.search.samplers.base import TrialRecord
from hpo.search.samplers.registry import SAMPLERS, make_sampler
from hpo.space import config_check
from hpo.space.space import Space
from hpo.space.values import identity, plain, same


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    dropout: float = 0.0
    big: int = 1
    kind: str | int | bool | None = "a"
    other: int = 1


def test_numbers_of_numpy_are_those_of_python():
    by_numpy = {
        "dropout": Float(np.float64(0.0), np.float64(0.5), step=np.float64(0.1), prior=np.float64(0.2)),
        "big": Int(np.int64(8), np.uint16(64), step=np.int32(8), tier=np.int8(2), strength=np.float64(0.25)),
        "kind": Choice(np.array([1, 2, 4]), when={"big": np.array([8, 16])}),
        "other": Int(np.int64(1), np.int64(16), powers_of_two=True, when={"kind": np.int64(2)}),
    }
    plainly = {
        "dropout": Float(0.0, 0.5, step=0.1, prior=0.2),
        "big": Int(8, 64, step=8, tier=2, strength=0.25),
        "kind": Choice([1, 2, 4], when={"big": [8, 16]}),
        "other": Int(1, 16, powers_of_two=True, when={"kind": 2}),
    }
    assert Space(by_numpy).describe() == Space(plainly).describe()
    config_check.check(Space(by_numpy), Config())
    assert Float(0.0, 0.5, step=0.1).at(np.float64(0.3)) == 0.3 and Int(1, 8).at(np.int64(3)) == 3
    assert Choice([1, 2]).at(np.int32(2)) == 1 and type(Int(1, 8).at(np.int64(3))) is int
    study = {"config": Config(), "task": "m:T", "space": plainly, "objectives": [Objective("val/loss")]}
    bound = Constraint("val/ms", upper=np.float32(0.5))
    assert Study("s", constraints=[bound], **study).constraints[0].upper == 0.5
    given = Study(
        "s", **study, enqueue=[{"big": np.int64(8)}], sampler={"name": "tpe", "n_startup_trials": np.int64(3)}
    )
    assert given.enqueue == ({"big": 8},) and type(given.enqueue[0]["big"]) is int
    assert given.sampler == {"name": "tpe", "n_startup_trials": 3}
    assert given.configure({"big": np.int64(16)}).config.big == 16
    with pytest.raises(SpaceError, match=r"step=nan must be a finite number"):
        Space({"dropout": Float(0.0, 0.5, step=np.float64("nan"))})


def test_equal_numbers_are_one_option_and_a_truth_is_none():
    assert same(0, 0.0) and same([1, {"a": 2.0}], [1.0, {"a": 2}]) and same(10**20, 1e20)
    assert not same(1, True) and not same(0, False) and not same(1, "1") and not same(0, None) and not same(math.nan, 0)
    assert identity(plain(np.float32(3))) == "3"
    choice = Choice([0, 0.1, 0.3])
    assert [choice.at(value) for value in (0.0, -0.0, 0, 0.1, False)] == [0, 0, 0, 1, None]
    assert choice.may_be(0.0) and not choice.may_be(False)
    with pytest.raises(SpaceError, match=r"option 0 stands twice"):
        Space({"dropout": Choice([0, 0.0, 0.1])})
    mixed = Space(
        {"kind": Choice([1, True]), "other": Int(1, 2, when={"kind": 1}), "dropout": Float(0, 1, when={"kind": True})}
    )
    assert mixed.decode({"kind": 0, "other": 1, "dropout": 0.5}) == {"kind": 1, "other": 1}
    assert mixed.decode({"kind": 1, "other": 1, "dropout": 0.5}) == {"kind": True, "dropout": 0.5}
    bound = Space({"other": Int(1, 2, when={"kind": True}), "big": Int(1, 2, when={"kind": 1})}).bound(Config(kind=1))
    assert set(bound.dimensions) == {"big"}


@rounds(
    ("dimension", "words"),
    [
        (Int(0, 10**30), rf"big: high={10**30} must be from -2\*\*53 to 2\*\*53"),
        (Int(-(10**400), 0), r"low=-1000\d+\.\.\. \(402 characters\) must be from"),
        (Int(0, 10**5000), "high=a number of some 5000 digits must be from"),
        (Int(0, 2**53 + 1), "must be from"),
        (Float(-1e308, 1e308), "further apart than a float can be"),
        (Float(0, 10**400), "high=1000.*must be a finite number"),
    ],
)
def test_numbers_too_large_are_refused_by_path_and_bound(dimension, words):
    with pytest.raises(SpaceError, match=words) as caught:
        Space({"big": dimension})
    assert len(str(caught.value)) < 300


MANY = {
    "big": Int(-(2**53), 2**53),
    "other": Int(1, 10**15 * 7 + 1, step=7),
    "width": Int(1, 2**50, log=True),
    "dropout": Float(0.0, 1e6, step=1e-4),
    "kind": Choice([1, 2]),
}


@rounds("name", [name for name in SAMPLERS if name != "grid"])
def test_ranges_too_large_to_list_are_never_listed(monkeypatch, name):
    init = optuna.samplers.GPSampler.__init__

    def quick(self, *given, **options):  # its acquisition function is searched from few points
        init(self, *given, **options)
        self._n_preliminary_samples, self._n_local_search = 64, 2

    monkeypatch.setattr(optuna.samplers.GPSampler, "__init__", quick)
    space, spec = Space(MANY), {"name": name} | ({"n_startup_trials": 3} if name == "gp" else {})
    sampler = make_sampler(spec, space, [Objective("val/loss")], 0)
    tracemalloc.start()
    for number in range(5):
        coordinates = sampler.ask(number).coordinates
        params = space.decode(coordinates)
        assert all(space.dimensions[path].may_be(value) for path, value in params.items()), (name, params)
        loss = float(params["dropout"])
        sampler.tell(TrialRecord(number, "complete", coordinates, (loss,), ((1, loss),)))
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest < 50e6, (name, largest)


def test_a_grid_and_a_divisor_of_too_many_numbers_are_refused():
    for path in ("other", "dropout"):
        with pytest.raises(SpaceError, match=rf"{path} has \d+ values, too many for a grid"):
            make_sampler("grid", Space({path: MANY[path]}), [Objective("val/loss")], 0).ask(0)
    assert len({Space({"big": MANY["big"]}).grid().point(k)["big"] for k in range(5)}) == 5
    space = Space({"big": Int(1, 10**9), "other": Int(1, 10**9, multiple_of="big")})
    with pytest.raises(UserError, match=r"other: multiple_of='big' may be any of 1000000000 numbers"):
        config_check.check(space, Config())
    assert Int(1, 10**12, multiple_of="big").value(0.5, 7) % 7 == 0


def test_an_option_that_may_be_a_truth_or_a_number_stays_what_it_is():
    assert Bool().at(1) is None and Bool().at(True) == 1
