"""What strategies whose trials come in generations promise, in simulated time; and the papers as oracles."""

from __future__ import annotations

import json
import math
import random
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from driven import driven
from hypothesis import given, settings
from hypothesis import strategies as st
from places import HARNESS
from rounds import rounds
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from hpo import Bool, Choice, Float, Int, Objective
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.search.population import gp_bandit
from hpo.search.population.base import SETTLED, PopulationStrategy
from hpo.search.population.pbt import FACTORS, perturbed
from hpo.search.samplers.base import TrialRecord, ask_seed
from hpo.search.samplers.registry import make_sampler
from hpo.search.strategies.registry import STRATEGIES, make_strategy
from hpo.search.strategies.table_history import TableHistory
from hpo.space.paths import check_path
from hpo.space.space import Space
from trainer.config import Frozen, TrainConfig

SPECS = [
    {"name": "pbt", "population": 6},
    {"name": "pbt", "population": 5, "interval": 2, "quantile": 0.5, "resample": 0.0, "perturb": ["lr", "layers"]},
    {"name": "pbt", "population": 2},
    {"name": "pb2", "population": 6},
    {"name": "pb2", "population": 4, "interval": 3, "perturb": ["lr", "*momentum", "name"]},
]
SPACE = Space(
    {
        "lr": Float(1e-4, 1e-1, log=True),
        "dropout": Float(0.0, 0.5, step=0.1),
        "name": Choice(["sgd", "adamw"]),
        "momentum": Float(0.0, 0.9, when={"name": "sgd"}),
        "heads": Int(1, 8, powers_of_two=True),
        "hidden": Int(16, 128, multiple_of="heads"),
        "layers": Int(1, 6),
        "gat": Bool(),
    }
)
EPOCHS = 6


@pytest.fixture(params=SPECS, ids=json.dumps)
def strategy(request):
    return make_strategy(request.param)


class Simulation:
    """A study on a made-up loss: what the driver and the workers do, in little. Every ask is of a sampler made anew,
    which learns what it may know in any order. `losses(simulation, number, params, epoch)` gives what a trial reports.
    """

    def __init__(self, strategy, losses, seed=0, epochs=EPOCHS, workers=1, objective=None, fails=lambda n, e: False):
        self.spec, self.losses, self.seed, self.epochs = strategy.model_dump(), losses, seed, epochs
        self.workers, self.fails = workers, fails
        self.objective = objective or Objective("val/loss")
        self.rng = random.Random(seed)
        self.records: dict[int, TrialRecord] = {}
        self.begun: dict[int, int] = {}

    @property
    def strategy(self):
        return make_strategy(json.loads(json.dumps(self.spec)))

    def sampler(self, number):
        first = make_sampler("random", SPACE, [self.objective], self.seed)
        sampler = self.strategy.sampler(first, SPACE, [self.objective], self.seed)
        begin = self.strategy.begin(number)
        known = list(self.records.values())
        self.rng.shuffle(known)
        for record in known:
            (sampler.tell if record.number < begin else sampler.adopt)(
                record if record.number < begin else replace(record, state="running", curve=(), values=None)
            )
        return sampler

    def run(self, trials=10_000):
        while len(self.records) < trials and not self.sampler(len(self.records)).exhausted(len(self.records)):
            generation = []
            begin = len(self.records)
            while len(self.records) < min(begin + self.strategy.population, trials):
                number = len(self.records)
                proposal = self.sampler(number).ask(number)
                self.records[number] = TrialRecord(number, "waiting", proposal.coordinates, parent=proposal.parent)
                generation.append(number)
            self.rng.shuffle(generation)  # workers end in any order
            for number in generation:
                self._train(number)
        return self

    def _train(self, number):
        record = self.records[number]
        begun = 0 if record.parent is None else self.records[record.parent].curve[-1][0]
        self.begun[number], curve, state = begun, [], "running"
        params = SPACE.decode(record.coordinates)
        for epoch in range(begun + 1, self.epochs + 1):
            if self.fails(number, epoch):
                state = "failed"
                break
            curve.append((epoch, self.losses(self, number, params, epoch)))
            if epoch == self.epochs:
                state = "complete"
            elif self.strategy.wants(epoch):
                verdict = self.strategy.decide(TableHistory(number, epoch, {number: curve}, {}))
                state = {"pause": "pruned", "continue": "running"}[verdict.kind]
            if state != "running":
                break
        self.records[number] = replace(record, state=state, curve=curve)

    def generation(self, index):
        size = self.strategy.population
        return [self.records[n] for n in range(index * size, (index + 1) * size)]


def noisy(simulation, number, params, epoch):
    rng = random.Random(simulation.seed * 1_000_003 + number * 101 + epoch)
    return math.nan if rng.random() < 0.05 else round(rng.random() + 1 / epoch, 2)


def test_every_strategy_that_breeds_is_bound_here():
    found = {name for name in STRATEGIES if isinstance(make_strategy(name), PopulationStrategy)}
    assert found == {spec["name"] for spec in SPECS}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), spec=st.sampled_from(SPECS), failures=st.sampled_from([0.0, 0.1, 0.6]))
def test_whatever_happens(seed, spec, failures):
    strategy = make_strategy(spec)

    def fails(number, epoch):
        return random.Random(seed + 7 * number + epoch).random() < failures / EPOCHS

    done = Simulation(strategy, noisy, seed, fails=fails).run()
    trained = sum(len(record.curve) for record in done.records.values())
    assert trained <= strategy.population * EPOCHS, "no more than its members in full"
    for number, record in done.records.items():
        assert record.state in ("complete", "pruned", "failed")
        assert [epoch for epoch, _ in record.curve] == list(
            range(done.begun[number] + 1, done.begun[number] + 1 + len(record.curve))
        )
        if record.state == "pruned":
            assert record.curve[-1][0] == strategy.end(number)
        SPACE.decode(record.coordinates)
        if number < strategy.population:
            assert record.parent is None
            continue
        parent = done.records[record.parent]
        assert parent.number // strategy.population == number // strategy.population - 1
        assert parent.state == "pruned" and math.isfinite(parent.curve[-1][1])
        check_descent(strategy, done, record, parent)


def check_descent(strategy, done, record, parent):
    """Truncation selection as the paper has it, written down anew."""
    size = strategy.population
    before = done.generation(record.number // size - 1)
    count = max(1, math.floor(size * strategy.quantile))
    good = [one for one in before if one.state == "pruned" and math.isfinite(one.curve[-1][1])]
    ranked = [one.number for one in sorted(good, key=lambda one: (one.curve[-1][1], one.number))]
    own = record.number - size
    settled = [path for path in SPACE.paths if path not in strategy.changeable(SPACE)]
    before_, after = SPACE.decode(parent.coordinates), SPACE.decode(record.coordinates)
    assert {p: before_.get(p) for p in settled} == {p: after.get(p) for p in settled}, "the donor's, as they were"
    if own in ranked[: size - count]:
        assert parent.number == own and record.coordinates == parent.coordinates
    else:
        assert parent.number in ranked[:count]


def test_the_same_study_however_it_is_cut(strategy):
    whole = Simulation(strategy, noisy, 5).run()
    parts = Simulation(strategy, noisy, 5)
    for trials in range(1, len(whole.records) + 1):
        parts.run(trials)
    assert parts.run().records == whole.records
    assert Simulation(strategy, noisy, 6).run().records != whole.records


def test_a_maximised_objective_is_decided_like_its_negative(strategy):
    lowest = Simulation(strategy, noisy, 3).run()
    highest = Simulation(strategy, lambda *at: -noisy(*at), 3, objective=Objective("x", "maximize")).run()
    assert {n: (r.coordinates, r.parent) for n, r in lowest.records.items()} == {
        n: (r.coordinates, r.parent) for n, r in highest.records.items()
    }


def test_nobody_left_to_go_on_from_ends_the_study(strategy):
    died = Simulation(strategy, noisy, fails=lambda number, epoch: number >= strategy.population).run()
    assert len(died.records) == 2 * strategy.population
    nobody = died.sampler(len(died.records)).exhausted(len(died.records))
    assert nobody == "nobody of the last generation is left to go on from"
    whole = Simulation(strategy, noisy, 5).run()
    assert whole.sampler(len(whole.records)).exhausted(len(whole.records)) == "its population is trained"
    blind = Simulation(strategy, lambda *at: math.nan).run()
    assert len(blind.records) == strategy.population


def test_the_first_generation_is_whole_though_the_space_is_smaller(strategy):
    few = Space(
        {"lr": Float(0.1, 0.2, step=0.1), "layers": Int(1, 2), "momentum": Float(0.1, 0.1), "name": Choice([1])}
    )
    first = make_sampler("random", few, [Objective("x")], 0)
    sampler = strategy.sampler(first, few, [Objective("x")], 0)
    params = []
    for number in range(strategy.population):
        assert not sampler.exhausted(number)
        params.append(json.dumps(sampler.ask(number).coordinates))
    assert len(set(params)) == min(4, strategy.population)


def test_only_what_may_change_is_perturbed_and_by_what_the_paper_says():
    strategy = make_strategy({"name": "pbt", "population": 8, "resample": 0.0, "perturb": ["lr"]})
    done = Simulation(strategy, noisy, 1).run()
    moved = [
        done_lr / parent_lr
        for record in done.records.values()
        if record.parent is not None and record.parent != record.number - 8
        for done_lr, parent_lr in [(record.coordinates["lr"], done.records[record.parent].coordinates["lr"])]
        if 1e-4 < done_lr < 1e-1
    ]
    assert len(moved) > 5
    assert {round(factor, 12) for factor in moved} == set(FACTORS)


@rounds(
    ("dimension", "value", "up", "down"),
    [
        (Float(0.0, 1.0), 0.5, 0.6, 0.4),
        (Float(0.0, 1.0), 0.9, 1.0, 0.72),
        (Float(0.0, 1.0, step=0.25), 0.25, 0.5, 0.0),
        (Float(0.0, 1.0, step=0.25), 1.0, 1.0, 0.75),
        (Int(1, 10), 2, 3, 1),
        (Int(1, 100), 50, 60, 40),
        (Int(1, 100, log=True), 10, 12, 8),
        (Int(1, 10), 10, 10, 8),
        (Int(8, 64, powers_of_two=True), 16, 32, 8),
        (Int(8, 64, multiple_of="x"), 16, 20, 12),
        (Choice(["a", "b"]), "a", "a", "a"),
        (Bool(), True, True, True),
    ],
)
def test_a_perturbation_by_kind(dimension, value, up, down):
    divisor = 4 if dimension.divisor else 1
    assert perturbed(dimension, value, 1.2, divisor) == pytest.approx(up)
    assert perturbed(dimension, value, 0.8, divisor) == pytest.approx(down)
    assert dimension.at(perturbed(dimension, value, 1.2, divisor), divisor) is not None


def test_what_may_change_is_the_floats_or_what_is_named():
    assert make_strategy("pbt").changeable(SPACE) == ("dropout", "lr", "momentum")
    assert make_strategy({"name": "pbt", "perturb": ["l*"]}).changeable(SPACE) == ("layers", "lr")
    bound = Space({"train.optim.lr": Float(0, 1), "train.init.gain": Float(0, 1)})
    assert make_strategy("pbt").changeable(bound) == ("train.optim.lr",)


@pytest.mark.parametrize("pattern", SETTLED)
def test_what_is_settled_are_fields_of_the_trainer(pattern):
    """One that was renamed would be perturbed after all, and nobody would notice."""
    check_path(Settings, pattern.removesuffix(".*"))


class Settings(Frozen):
    train: TrainConfig = TrainConfig()


@rounds(
    ("perturb", "space", "words"),
    [
        (["momentun"], SPACE, "momentun matches no dimension"),
        (["heads"], SPACE, "heads decides over hidden, which is to stay"),
        (["train.batch_size"], Space({"train.batch_size": Int(1, 8)}), "train.batch_size cannot change"),
        (None, Space({"layers": Int(1, 3)}), "has no dimension that may change"),
    ],
)
def test_a_space_that_cannot_change_is_refused_in_one_sentence(perturb, space, words):
    with pytest.raises(UserError, match=words) as caught:
        make_strategy({"name": "pbt", "perturb": perturb}).check(space)
    assert "\n" not in str(caught.value)


# --- what such a study is


def test_such_a_study_is_ordered_and_as_wide_as_its_population(home):
    spec = declare(request_of(home, reference="mlp", strategy="pbt", workers=3), None, workers=3).spec
    assert (spec.order, spec.window) == ("ordered", 8)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"order": "async"}, "--order async: under pbt a generation begins once the last one has ended"),
        ({"window": 3}, "--window 3: under pbt"),
        ({"trials": 7}, "--trials 7: pbt needs --trials 40, 8 members in 5 generations, since a trial"),
        ({"trials": 6}, "--trials 6: pbt needs --trials 8, 8 members in 1 generation, since the study .*num_epochs"),
        ({"epochs": 39}, "--epochs 39: pbt needs --epochs 40, 8 members of 5 epochs each, to train its population"),
        ({"sampler": "grid", "tier": 1}, "--sampler grid: it has . points, and a population of 8 needs as many"),
    ],
)  # fmt: skip
def test_what_contradicts_a_population_is_refused(home, tmp_path, flags, words):
    study = tmp_path / "small.py"
    study.write_text(
        "from hpo import Float, Objective\nfrom hpo import Study\nfrom pydantic import BaseModel\n"
        "from trainer.config import TrainConfig\n"
        "class Config(BaseModel):\n    train: TrainConfig = TrainConfig(num_epochs=5)\n"
        "STUDY = Study('small', Config(), 'x:Y', {'train.optim.lr': Float(1e-3, 1.0)}, [Objective('x')])\n"
    )
    if "num_epochs" in words:
        study.write_text(study.read_text().replace("train: TrainConfig = TrainConfig(num_epochs=5)", "lr: float = 0.1"))
        study.write_text(study.read_text().replace("'train.optim.lr'", "'lr'"))
    with pytest.raises(UserError, match=words):
        declare(request_of(home, reference=str(study), strategy="pbt", **flags), None, workers=2)


@pytest.mark.parametrize("name", ["pbt", "pb2"])
@pytest.mark.parametrize(("epochs", "refused"), [(24, True), (25, False)])
def test_a_budget_of_epochs_trains_a_whole_population_or_is_refused(home, tmp_path, name, epochs, refused):
    """Three members of nine epochs, three of them a generation: what is asked for last may exceed the budget by two."""
    study = tmp_path / "kept.py"
    kept = HARNESS / "kept_study.py"
    spec = {"name": name, "population": 3, "interval": 3}
    study.write_text(kept.read_text().replace('sampler="random"', f'sampler="random", strategy={spec!r}'))
    request = request_of(home, reference=str(study), epochs=epochs)
    with closing(Ledger(home.create().storage)) as ledger:
        if refused:
            with pytest.raises(UserError, match=f"--epochs 24: {name} needs --epochs 27"):
                driven(ledger, request, epochs=epochs)
            return
        assert driven(ledger, request, epochs=epochs)[1] == "complete"
        states = [row.state for row in ledger.look(lambda c: queries.trial_rows(c, 1))]
        assert states[6:] == ["complete"] * 3, "the last generation is whole"
        declare(request_of(home, name="kept"), ledger, workers=1)  # no budget is given: what was begun may go on


# --- pb2


def test_the_kernel_is_the_papers_formula():
    """Parker-Holder et al. 2020, section 4.2: k_SE(x, x') (1 - omega)^(|t - t'| / 2)."""
    rng = np.random.default_rng(0)
    x, y, t, s = rng.random((5, 3)), rng.random((4, 3)), rng.integers(0, 9, 5) * 1.0, rng.integers(0, 9, 4) * 1.0
    found = gp_bandit.Kernel(1.7, 0.4, 0.2)(x, t, y, s)
    for i in range(5):
        for j in range(4):
            square = sum((a - b) ** 2 for a, b in zip(x[i], y[j], strict=True))
            expected = 1.7 * math.exp(-square / (2 * 0.4**2)) * (1 - 0.2) ** (abs(t[i] - s[j]) / 2)
            assert found[i, j] == pytest.approx(expected, rel=1e-13)
    assert found.dtype == np.float64


def test_the_posterior_is_scikit_learns_where_time_stands_still():
    rng = np.random.default_rng(1)
    x, y, new = rng.random((12, 2)), rng.normal(size=12), rng.random((7, 2))
    ours = gp_bandit.Process(x, np.zeros(12), y, gp_bandit.Kernel(2.0, 0.3, 0.5), 0.05)
    theirs = GaussianProcessRegressor(ConstantKernel(2.0) * RBF(0.3), alpha=0.05, optimizer=None).fit(x, y)
    mean, deviation = ours.at(new, 0.0)
    expected = theirs.predict(new, return_std=True)
    assert mean == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert deviation == pytest.approx(expected[1], rel=1e-7)
    pending = ours.and_pending(new, 0.0)
    assert (pending.at(new, 0.0)[1] < deviation).all(), "what is being tried is known the better"
    assert ours.at(new, 20.0)[0] == pytest.approx(np.zeros(7), abs=0.01), "what is long ago tells nothing"


def test_the_width_of_the_bound_is_the_papers():
    assert gp_bandit.width(100) == pytest.approx(math.sqrt(0.2 + math.log(0.4 * 100)))
    assert gp_bandit.width(0) == gp_bandit.width(1) == pytest.approx(math.sqrt(0.2))


def drifting(simulation, number, params, epoch):
    """A loss that falls the faster the nearer lr is to a rate that drifts from 1e-1 to 1e-4 while training goes on."""
    record = simulation.records[number]
    if not hasattr(simulation, "reached"):
        simulation.reached = {}
    before = simulation.reached.get((number, epoch - 1), simulation.reached.get((record.parent, epoch - 1), 10.0))
    place = SPACE.dimensions["lr"].to_unit(params["lr"])
    best = 1.0 - 0.9 * epoch / simulation.epochs
    simulation.reached[number, epoch] = before - 0.3 * math.exp(-((place - best) ** 2) / (2 * 0.1**2))
    return simulation.reached[number, epoch]


def test_where_the_best_rate_drifts_the_bandit_is_ahead():
    """In as many epochs of simulated training, over four seeds."""
    final = {}
    for name in ("pbt", "pb2"):
        strategy = make_strategy({"name": name, "population": 6, "perturb": ["lr"]})
        runs = [Simulation(strategy, drifting, seed, epochs=16).run() for seed in range(4)]
        final[name] = [min(record.curve[-1][1] for record in run.generation(15)) for run in runs]
    wins = sum(bandit_ < random_ for bandit_, random_ in zip(final["pb2"], final["pbt"], strict=True))
    print(f"mean final loss {np.mean(final['pbt']):.2f} by pbt, {np.mean(final['pb2']):.2f} by pb2; {wins} of 4")
    assert np.mean(final["pb2"]) < np.mean(final["pbt"]) - 0.2 and wins == 4


def test_the_numbers_of_draws_are_the_trials_own():
    """So a trial's perturbation is a function of (study seed, trial number)."""
    assert len({ask_seed(seed, number) for seed in range(20) for number in range(50)}) == 1000
