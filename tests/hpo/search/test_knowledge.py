"""What earlier studies teach: regrets, the portfolio, densities, and how soon a study that misleads loses its say."""

from __future__ import annotations

import math
import random

import pytest

from hpo import Choice, Float, Int, Objective
from hpo.search.knowledge import KEPT, Observed, Teachers, regrets, teach
from hpo.search.samplers.base import ORIGIN, TrialRecord
from hpo.search.samplers.learned import PLACES
from hpo.search.samplers.registry import WARM, make_sampler
from hpo.space.space import Space

SPACE = Space({"x": Float(0.0, 1.0), "lr": Float(1e-4, 1e-1, log=True), "name": Choice(["sgd", "adamw"])})
ONE = [Objective("val/loss")]


def loss(params, best=(0.3, 0.7)):
    lr = (math.log10(params["lr"]) + 4) / 3
    return (params["x"] - best[0]) ** 2 + (lr - best[1]) ** 2 + (params["name"] == "sgd")


def searched(seed, count=60, best=(0.3, 0.7), sign=1.0, space=SPACE):
    rng = random.Random(seed)
    drawn = [space.decode(space.from_unit([rng.random() for _ in range(len(space))])) for _ in range(count)]
    return list(zip(drawn, regrets([[sign * loss(params, best)] for params in drawn]), strict=True))


def _record(number, proposal, value):
    curve = [(1, value + 1), (2, value)]
    attributes = proposal.trial_attrs, proposal.study_attrs
    return TrialRecord(number, "complete", proposal.coordinates, (value,), curve, *attributes)


def asked(name, knowledge, count, told=True):
    """The proposals of a study in a window of 4, with what they come from."""
    made = make_sampler(name, SPACE, ONE, 3, knowledge=knowledge)
    records: list[TrialRecord] = []
    proposals = []
    for number in range(count):
        if told and number >= 4:
            made.tell(records[number - 4])
        proposal = made.ask(number)
        value = loss(SPACE.decode(proposal.coordinates))
        records.append(_record(number, proposal, value))
        proposals.append(proposal)
    return proposals


def test_regrets_are_between_the_best_and_twice_the_median():
    assert regrets([[1.0], [3.0], [2.0], [99.0], None]) == [0.0, 1.333333, 0.666667, 2.0, 2.0]
    assert regrets([[5.0], [5.0]]) == [0.0, 0.0]
    assert regrets([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]]) == [1.0, 1.0, 1.0], "each objective counts the same"


def test_the_portfolio_covers_studies_that_disagree():
    one, other = searched(1, best=(0.1, 0.1)), searched(2, best=(0.9, 0.9))
    portfolio = teach(SPACE, {"one": one, "other": other})["portfolio"]
    for trials, best in ((one, (0.1, 0.1)), (other, (0.9, 0.9))):
        median = sorted(loss(params, best) for params, _ in trials)[30]
        assert min(loss(entry["params"], best) for entry in portfolio) < 0.2 * median
    assert len(portfolio) <= len(PLACES) and {entry["study"] for entry in portfolio} == {"one", "other"}
    assert [entry["params"] for entry in teach(SPACE, {"one": one})["portfolio"]] == [min(one, key=lambda t: t[1])[0]]


def test_a_space_takes_what_lies_in_it():
    """Other ranges and fewer or more dimensions; of a study of which nothing lies there nothing is learned."""
    narrow = Space({"x": Float(0.0, 0.5), "lr": Float(1e-3, 1e-1, log=True), "layers": Int(1, 3)})
    trials = searched(1)
    within = [params for params, _ in trials if params["x"] <= 0.5 and params["lr"] >= 1e-3]
    knowledge = teach(narrow, {"one": trials})
    [lesson] = knowledge["studies"]
    assert lesson["trials"] == len(within) and lesson["paths"] == ["lr", "x"]
    assert knowledge["portfolio"][0]["params"].keys() == {"x", "lr"}
    proposal = make_sampler("tpe", narrow, ONE, 0, knowledge=knowledge).ask(0)
    assert knowledge["portfolio"][0]["params"].items() <= narrow.decode(proposal.coordinates).items()
    assert 1 <= proposal.coordinates["layers"] <= 3, "what it has not searched is drawn"
    assert teach(Space({"x": Float(2.0, 3.0)}), {"one": trials}) == {} == teach(SPACE, {"one": trials[:1]})


def test_of_a_long_study_the_best_and_some_of_each_rank_are_kept():
    lesson = teach(SPACE, {"one": searched(1, 1000)})["studies"][0]
    assert len(lesson["points"]) == len(lesson["regrets"]) == KEPT and lesson["trials"] == 1000
    assert lesson["regrets"] == sorted(lesson["regrets"]) and lesson["regrets"][0] == 0 and lesson["regrets"][-1] == 2


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["alike", "misleading"])
def test_a_study_that_misleads_loses_its_say_within_ten_trials(sign):
    knowledge = teach(SPACE, {"one": searched(1, sign=sign)})
    origins = [proposal.trial_attrs.get(ORIGIN, "") for proposal in asked("freeze-thaw", knowledge, 40)]
    late = [origin for origin in origins[10:] if origin.startswith(("portfolio", "density"))]
    assert origins[0] == "portfolio of one" and bool(late) == (sign > 0)


def test_worth_is_the_rank_correlation_with_what_was_seen():
    teachers = Teachers(SPACE, teach(SPACE, {"one": searched(1, 200), "upside down": searched(1, 200, sign=-1.0)}))
    assert teachers.worths({}) == [0.5, 0.5]
    trials = {}
    for number, (params, _) in enumerate(searched(7, 12)):
        place = {path: SPACE.dimensions[path].to_unit(u) for path, u in SPACE.encode(params, params).items()}
        trials[number] = Observed(place, [(1, 9.0), (2, loss(params))] if number % 2 else [(2, loss(params))])
    alike, misleading = teachers.worths(trials)
    assert alike > 0.7 and misleading == 0.0


def test_curves_are_compared_where_both_have_been():
    teachers = Teachers(SPACE, teach(SPACE, {"one": searched(1, 200)}))
    good, bad = {"x": 0.3, "lr": 0.7, "name": 0.75}, {"x": 0.9, "lr": 0.1, "name": 0.25}
    stopped = {0: Observed(good, [(1, 3.0)]), 1: Observed(bad, [(1, 4.0), (9, 2.0)])}
    assert teachers.worths(stopped)[0] > 0.5, "after one epoch the good one was the better"
    assert teachers.worths({0: stopped[0]}) == [0.5], "one trial tells nothing"


@pytest.mark.parametrize("name", [name for name in WARM if name != "gp"])
def test_proposals_are_a_function_of_knowledge_tells_and_seed(name):
    """Each rebuild, which is told in another order, asks for the same; without knowledge nothing changes."""
    knowledge = teach(SPACE, {"one": searched(1), "other": searched(2, best=(0.5, 0.5))})
    proposals = asked(name, knowledge, 14)
    for number in (1, 6, 9, 13):
        again = make_sampler(name, SPACE, ONE, 3, knowledge=knowledge)
        for k in reversed(range(number)):
            value = loss(SPACE.decode(proposals[k].coordinates))
            record = _record(k, proposals[k], value)
            again.tell(record) if k <= number - 4 else again.adopt(record.open())
        assert again.ask(number).coordinates == proposals[number].coordinates
    assert asked(name, {}, 9) == asked(name, None, 9)


def test_a_density_lies_near_what_was_good():
    knowledge = teach(SPACE, {"one": searched(1, 200)})
    drawn = [p.coordinates for p in asked("tpe", knowledge, 60) if p.trial_attrs.get(ORIGIN) == "density of one"]
    near = sum(loss(SPACE.decode(coordinates)) < 0.15 for coordinates in drawn)
    assert len(drawn) > 5 and near / len(drawn) > 0.7
