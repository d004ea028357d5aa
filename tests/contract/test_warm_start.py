"""What a warm start with enough trials makes of every sampler with a model: it proposes near what was good there."""

import math
import random
import statistics
from dataclasses import replace

import pytest

from hpo import Float, Objective
from hpo.search.samplers.base import TrialRecord
from hpo.search.samplers.registry import WARM, make_sampler
from hpo.space.space import Space

MODELS = [name for name in WARM if name not in ("freeze-thaw", "bohb")]  # those of no strategy

SPACE = Space({"x": Float(0.0, 1.0), "lr": Float(1e-4, 1e-1, log=True)})
ONE = [Objective("val/loss")]
GENETIC = ("nsga2", "nsga3")
GENERATION = 50  # of these; with fewer they draw at random


def off(at):
    """How far from the best, on the unit square."""
    return math.dist((at["x"], (math.log10(at["lr"]) + 4) / 3), (0.2, 0.8))


def earlier(count):
    rng, found = random.Random(0), []
    for number in range(count):
        at = {"x": rng.random(), "lr": 10 ** rng.uniform(-4, -1)}
        found.append(TrialRecord(number, "complete", at, (off(at) ** 2,)))
    return found


def asked(name, known, count):
    """The first proposals of a study, before anything is known of them."""
    sampler = make_sampler(name, SPACE, ONE, 1, earlier=known)
    return [sampler.ask(number).coordinates for number in range(count)]


@pytest.mark.parametrize(
    ("name", "known", "count"),
    [(name, 8 * GENERATION if name in GENETIC else GENERATION + 10, 3 if name == "gp" else 12) for name in MODELS],
)
def test_every_model_begins_where_the_earlier_trials_were_good(name, known, count):
    """A generation is bred from the best fifty, so that it takes many trials to be among few good ones; of its
    children, those that are among the earlier trials make way for others."""
    warm, cold = asked(name, earlier(known), count), asked(name, (), count)
    near, far = (statistics.median(map(off, found)) for found in (warm, cold))
    assert near < (0.8 if name in GENETIC else 0.7) * far, (near, far)


def stopped(count):
    """Trials that were stopped at epoch 4 at the latest, those that are far off before."""
    found = []
    for record in earlier(count):
        loss = record.values[0]
        curve = [(epoch, loss + 0.1 / epoch) for epoch in range(1, 3 if loss > 0.3 else 5)]
        found.append(replace(record, state="pruned", values=(curve[-1][1],), curve=curve))
    return found


@pytest.mark.parametrize("name", [name for name in WARM if name not in GENETIC])
def test_every_model_learns_from_the_curves_of_stopped_trials(name):
    known = stopped(6 * GENERATION if name == "bohb" else GENERATION)  # it learns from those at its rung alone
    warm, cold = asked(name, known, 3 if name == "gp" else 12), asked(name, (), 12)
    near, far = (statistics.median(map(off, found)) for found in (warm, cold))
    assert near < (0.8 if name in GENETIC else 0.7) * far, (near, far)


def test_what_a_model_of_curves_takes_over_is_no_trial_of_its_own():
    """A strategy ranks this study's trials alone; a rebuild proposes the same."""
    sampler = make_sampler("freeze-thaw", SPACE, ONE, 1, earlier=stopped(20))
    first = [sampler.ask(number).coordinates for number in range(6)]
    assert set(sampler.features()) == set(range(6))
    again = make_sampler("freeze-thaw", SPACE, ONE, 1, earlier=stopped(20))
    for number, coordinates in enumerate(first[:5]):
        again.adopt(TrialRecord(number, "running", coordinates))
    assert again.ask(5).coordinates == first[5]


@pytest.mark.parametrize("name", GENETIC)
def test_less_than_a_generation_breeds_nothing_yet(name):
    cold = asked(name, (), 3)
    assert asked(name, earlier(GENERATION - 1), 3) == cold
    assert asked(name, earlier(GENERATION), 3) != cold
