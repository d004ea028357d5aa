"""What a warm start with enough trials makes of every sampler with a model: it proposes near what was good there."""

import math
import random
import statistics

import pytest

from hpo import Float, Objective
from hpo.search.samplers.base import TrialRecord
from hpo.search.samplers.registry import MODELS, make_sampler
from hpo.space.space import Space

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
    """A generation is bred from the best fifty, so that it takes many trials to be among few good ones."""
    warm, cold = asked(name, earlier(known), count), asked(name, (), count)
    near, far = (statistics.median(map(off, found)) for found in (warm, cold))
    assert near < 0.7 * far, (near, far)


@pytest.mark.parametrize("name", GENETIC)
def test_less_than_a_generation_breeds_nothing_yet(name):
    cold = asked(name, (), 3)
    assert asked(name, earlier(GENERATION - 1), 3) == cold
    assert asked(name, earlier(GENERATION), 3) != cold
