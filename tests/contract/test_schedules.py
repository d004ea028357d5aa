"""Every schedule: continuous, within its bounds, equal to torch's or to the formula published; and searchable."""

from __future__ import annotations

import itertools
import math
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rounds import rounds
from torch.optim import lr_scheduler as theirs
from trainer_runs import Toy

from hpo.space.space import Choice, Float, Int, Space
from trainer.config import Frozen, OptimConfig, PlateauConfig, ScheduleConfig, TrainConfig
from trainer.config.optim import OPTIMIZERS
from trainer.config.schedule import OWN_FIELDS
from trainer.diagnose.trial import Steps, fresh
from trainer.errors import ConfigError
from trainer.optim import build as optim
from trainer.optim.schedule import (
    SCHEDULES,
    WARMUPS,
    Plateau,
    Run,
    momentum,
    never_warm,
    scaled_lr,
    schedule,
    set_momentum,
    warmup_length,
)
from trainer.runtime.epochs import Epochs

NAMES = tuple(OWN_FIELDS)
LR = 0.3

# What a search may give to the fields that schedules have of their own.
VALUES = {
    "min_lr": st.floats(0, 1),
    "num_cycles": st.integers(1, 5),
    "cycle_mult": st.floats(1, 3),
    "power": st.floats(0.2, 4),
    "gamma": st.floats(0.01, 1),
    "step_size": st.floats(0.1, 50),
    "milestones": st.lists(st.floats(0, 80), min_size=1, max_size=4, unique=True).map(sorted),
    "timescale": st.floats(1, 1000),
    "decay_ratio": st.floats(0.01, 1),
    "decay_shape": st.sampled_from(["sqrt", "linear", "cosine"]),
    "cycle_mode": st.sampled_from(["triangular", "triangular2", "exp_range"]),
    "one_cycle": st.fixed_dictionaries({"pct_start": st.floats(0, 1), "div_factor": st.floats(1, 30)}),
    "plateau": st.just({}),
}


@st.composite
def configs(draw, names=NAMES) -> ScheduleConfig:
    name = draw(st.sampled_from(names))
    fields = {field: draw(st.none() | VALUES[field]) for field in OWN_FIELDS[name]}
    fields = {field: value for field, value in fields.items() if value is not None}
    if name == "cyclical" and fields.get("cycle_mode") != "exp_range":
        fields.pop("gamma", None)
    warmup = draw(st.none() | st.integers(0, 4000))
    shape = "linear" if name == "one_cycle" else draw(st.sampled_from(list(WARMUPS)))
    if shape == "polynomial":
        fields["warmup_power"] = draw(st.none() | st.floats(0.2, 4))
    if shape == "exponential":
        fields["warmup_start"] = draw(st.none() | st.floats(1e-3, 1))
    return ScheduleConfig(name=name, warmup=shape, warmup_steps=warmup, **fields)


def hoelder(h: float, length: float, power: float = 1.0) -> float:
    """The most that x^power moves on [0, 1] when x moves by h / length."""
    return max(power, 1.0) * (h / length) ** min(power, 1.0)


def furthest(config: ScheduleConfig, run: Run, h: float) -> float:
    """The most that the rate may move within h steps as a share of the peak, by the slope of what is chosen."""
    c, fall = config, run.fall
    gamma = 1 - c.own("gamma") ** (h / run.lengths.steps) if "gamma" in c.own_fields else 0.0
    if c.name in ("constant", "plateau", "step", "multi_step"):
        after = 0.0
    elif c.name == "one_cycle":
        rise = [run.warmup] if run.warmup > 0 else []
        after = math.pi / 2 * sum(h / length for length in [*rise, max(run.total - 1 - run.warmup, 1)])
    elif c.name == "cosine_restarts":
        lengths = [c.own("cycle_mult") ** i for i in range(c.own("num_cycles"))]
        after = math.pi / 2 * h * sum(lengths) / min(lengths) / fall
    elif c.name == "wsd":
        length = min(c.own("decay_ratio") * run.total, fall)
        after = max(hoelder(h, length, 0.5), math.pi / 2 * hoelder(h, length))
    elif c.name == "cyclical":
        after = 2 * c.own("num_cycles") * h / fall + gamma
    elif c.name == "inverse_sqrt":
        after = h / 2 / (c.own("timescale") or run.warmup + 1)
    elif c.name == "exponential":
        after = gamma
    else:
        power = c.own("power") if c.name == "polynomial" else 1.0
        after = math.pi / 2 * hoelder(h, fall, power)
    slopes = {
        "linear": hoelder(h, run.warmup + 1),
        "cosine": math.pi / 2 * hoelder(h, run.warmup + 1),
        "polynomial": hoelder(h, run.warmup + 1, c.warmup_power or 2.0),
        "exponential": -math.log(c.warmup_start or 0.01) * h / (run.warmup + 1),
    }
    return after + slopes[c.warmup]


def edges(config: ScheduleConfig, run: Run) -> list[float]:
    """Where the schedule's nature is a jump."""
    if config.name == "cosine_restarts":
        lengths = [config.own("cycle_mult") ** i for i in range(config.own("num_cycles"))]
        return [run.warmup + run.fall * x / sum(lengths) for x in itertools.accumulate(lengths[:-1])]
    if config.name == "step":
        size = config.own("step_size")
        size = math.ceil(run.total / 3) if size is None else size * run.lengths.steps
        return [size * i for i in range(1, math.ceil(run.total / size) + 1)]
    if config.name == "multi_step":
        at = config.own("milestones")
        return [round(e * run.lengths.steps) for e in at] if at else [round(run.total * x) for x in (0.5, 0.75)]
    return []


@given(
    config=configs(),
    total=st.integers(1, 3000),
    steps_per_epoch=st.integers(1, 100),
    where=st.floats(0, 1),
    h=st.floats(1e-6, 2),
)
def test_no_jump_larger_than_the_slope_allows(config, total, steps_per_epoch, where, h):
    run = Run(LR, warmup_length(config, total, Epochs(steps_per_epoch)), total, Epochs(steps_per_epoch))
    lr_at, step = schedule(config, LR, total, Epochs(steps_per_epoch)), where * total
    before, after = lr_at(step), lr_at(step + h)
    assert 0 <= before <= LR * (1 + 1e-12)
    if not any(step - 1e-6 <= edge <= step + h + 1e-6 for edge in edges(config, run)):
        assert abs(after - before) <= LR * furthest(config, run, h) + 1e-9


@given(config=configs(("step", "multi_step")), total=st.integers(1, 500))
def test_a_step_multiplies_by_gamma_and_by_nothing_else(config, total):
    config = config.model_copy(update={"warmup_steps": None, "min_lr": None})
    values = [schedule(config, LR, total, Epochs(10))(step) for step in range(total)]
    jumps = {b / a for a, b in itertools.pairwise(values) if b > 1e-250}
    powers = [config.own("gamma") ** k for k in range(5)]  # milestones may round to the same step
    assert all(any(math.isclose(jump, power, rel_tol=1e-9) for power in powers) for jump in jumps)


@rounds("warmup", WARMUPS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "one_cycle"])
def test_a_warmup_rises_from_above_zero_to_where_the_schedule_starts(name, warmup):
    length = 7
    lr_at = schedule(ScheduleConfig(name=name, warmup=warmup, warmup_steps=length), LR, 100, Epochs(10))
    values = [lr_at(step) for step in range(length + 1)]
    assert values[0] > 0
    assert all(a < b for a, b in itertools.pairwise(values))
    assert values[-1] == (LR / 4 if name == "cyclical" else LR)
    top, d = values[-1], length + 1
    formulas = {
        "linear": lambda n: n / d,
        "cosine": lambda n: math.sin(math.pi * n / d / 2) ** 2,
        "polynomial": lambda n: (n / d) ** 2,
        "exponential": lambda n: math.exp(math.log(0.01) * (d - n) / d),
    }
    assert values == pytest.approx([top * formulas[warmup](n) for n in range(1, d + 1)], rel=1e-12)


# --- Bit for bit what the first four schedules were


def before(name: str, lr: float, total: int, warmup: int, min_lr: float):
    """What constant, cosine, one_cycle and plateau have been from the beginning."""

    def cosine(start, end, progress):
        return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    if name == "one_cycle":
        low, fall = lr / 25.0, max(total - 1 - warmup, 1)
        end = low / 1e4
        return lambda s: cosine(low, lr, s / warmup) if s < warmup else cosine(lr, end, (s - warmup) / fall)
    floor, fall = min(min_lr, lr) if name == "cosine" else lr, max(total - warmup, 1)
    return lambda s: lr * (s + 1) / (warmup + 1) if s < warmup else cosine(lr, floor, (s - warmup) / fall)


@given(
    name=st.sampled_from(["constant", "cosine", "one_cycle", "plateau"]),
    lr=st.floats(1e-6, 10),
    total=st.integers(1, 200),
    warmup=st.integers(0, 250),
    min_lr=st.floats(0, 1),
)
def test_the_first_four_keep_every_bit(name, lr, total, warmup, min_lr):
    own = {"min_lr": min_lr} if name == "cosine" else {}
    lr_at = schedule(ScheduleConfig(name=name, warmup_steps=warmup, **own), lr, total, Epochs(10))
    expected = before(name, lr, total, warmup, min_lr)
    assert [lr_at(s) for s in range(total + 1)] == [expected(s) for s in range(total + 1)]


# --- Torch's schedulers, at every step


def optimizer(lr: float = LR) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=lr)


def rates(scheduler, steps: int) -> list[float]:
    """The learning rates a torch scheduler gives to the first `steps` steps."""
    values = []
    for _ in range(steps):
        values.append(scheduler.optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.optimizer.step()
            scheduler.step()
    return values


TOTAL = 84
# Ours counts epochs where torch counts scheduler steps: with one step an epoch they are the same.
TORCH = {
    "constant": ({}, lambda o: theirs.ConstantLR(o, factor=1.0)),
    "cosine": ({"min_lr": 0.02}, lambda o: theirs.CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.02)),
    "cosine_restarts": (
        {"min_lr": 0.02, "num_cycles": 3, "cycle_mult": 2},
        lambda o: theirs.CosineAnnealingWarmRestarts(o, T_0=TOTAL // 7, T_mult=2, eta_min=0.02),
    ),
    "polynomial": ({"power": 1.7}, lambda o: theirs.PolynomialLR(o, total_iters=TOTAL, power=1.7)),
    "linear": (
        {"min_lr": 0.03},
        lambda o: theirs.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=TOTAL),
    ),
    "exponential": ({"gamma": 0.97}, lambda o: theirs.ExponentialLR(o, gamma=0.97)),
    "step": ({"step_size": 9, "gamma": 0.5}, lambda o: theirs.StepLR(o, step_size=9, gamma=0.5)),
    "multi_step": (
        {"milestones": (10, 30, 31), "gamma": 0.3},
        lambda o: theirs.MultiStepLR(o, milestones=[10, 30, 31], gamma=0.3),
    ),
}


@rounds("warmup", [0, 9])
@pytest.mark.parametrize("name", TORCH)
def test_equal_to_torch_at_every_step(name, warmup):
    """With a warmup, what follows it is torch's own shifted by W, as its SequentialLR does; but step and multi_step
    count their epochs from the run's beginning."""
    fields, build = TORCH[name]
    offset = 0 if name in ("step", "multi_step") else warmup
    config = ScheduleConfig(name=name, warmup_steps=warmup, **fields)
    lr_at = schedule(config, LR, TOTAL + offset, Epochs(1))
    expected = rates(build(optimizer()), TOTAL)
    assert [lr_at(s + offset) for s in range(warmup - offset, TOTAL)] == pytest.approx(
        expected[warmup - offset :], rel=1e-9
    )
    if offset:
        rise = theirs.LinearLR(optimizer(), start_factor=1 / (warmup + 1), total_iters=warmup)
        assert [lr_at(s) for s in range(warmup)] == pytest.approx(rates(rise, warmup), rel=1e-9)


@rounds("mode", ["triangular", "triangular2", "exp_range"])
def test_cyclical_equals_torch(mode):
    gamma = {"gamma": 0.99} if mode == "exp_range" else {}
    config = ScheduleConfig(name="cyclical", num_cycles=3, cycle_mode=mode, min_lr=0.05, **gamma)
    expected = theirs.CyclicLR(
        optimizer(), base_lr=0.05, max_lr=LR, step_size_up=TOTAL // 6, mode=mode, cycle_momentum=False, **gamma
    )
    lr_at = schedule(config, LR, TOTAL, Epochs(1))
    assert [lr_at(step) for step in range(TOTAL)] == pytest.approx(rates(expected, TOTAL), rel=1e-9)


def test_warmup_and_cosine_equal_torchs_sequence():
    total, warmup, floor = 57, 9, 0.02
    o = optimizer()
    expected = theirs.SequentialLR(
        o,
        [
            theirs.LinearLR(o, start_factor=1 / (warmup + 1), total_iters=warmup),
            theirs.CosineAnnealingLR(o, T_max=total - warmup, eta_min=floor),
        ],
        milestones=[warmup],
    )
    lr_at = schedule(ScheduleConfig(name="cosine", warmup_steps=warmup, min_lr=floor), LR, total, Epochs(10))
    assert [lr_at(step) for step in range(total)] == pytest.approx(rates(expected, total), rel=1e-9)
    assert lr_at(total) == pytest.approx(floor)


@rounds("pct_start", [0.1, 0.3, 0.65])
def test_one_cycle_equals_torch(pct_start):
    total = 100
    config = ScheduleConfig(name="one_cycle", one_cycle={"pct_start": pct_start})
    lr_at = schedule(config, LR, total, Epochs(10))
    expected = theirs.OneCycleLR(optimizer(), max_lr=LR, total_steps=total, pct_start=pct_start, cycle_momentum=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [*rates(expected, total - 1), expected.get_last_lr()[0]]
    assert [lr_at(step) for step in range(total)] == pytest.approx(values, rel=1e-9)


@rounds(("pct_start", "total"), [(0.1, 100), (0.3, 41), (0.65, 100)])
@rounds("adam", [False, True])
def test_one_cycles_momentum_equals_torchs(pct_start, total, adam):
    """In the momentum of SGD's groups, and in the first of Adam's betas, of which the second stays."""
    config = ScheduleConfig(name="one_cycle", one_cycle={"pct_start": pct_start, "momentum": [0.7, 0.92]})
    momentum_at = momentum(config, total, Epochs(10))
    assert momentum_at is not None
    p, name = torch.nn.Parameter(torch.zeros(1)), "adamw" if adam else "sgd"
    reference = torch.optim.AdamW([p]) if adam else torch.optim.SGD([p], lr=LR, momentum=0.9)
    ours = optim.build(OptimConfig(name=name), torch.nn.Linear(2, 2))
    cycle = theirs.OneCycleLR(
        reference, max_lr=LR, total_steps=total, pct_start=pct_start, base_momentum=0.7, max_momentum=0.92
    )
    for step in range(total):
        expected = reference.param_groups[0]
        for group in ours.param_groups:
            set_momentum(group, momentum_at(step))
            if adam:
                assert group["betas"] == (pytest.approx(expected["betas"][0], rel=1e-9), 0.999)
            else:
                assert group["momentum"] == pytest.approx(expected["momentum"], rel=1e-9)
        reference.step()
        if step < total - 1:
            cycle.step()


def test_the_momentum_of_each_step_is_the_schedules_and_no_state():
    """Muon's groups have the one or the other. A checkpoint has neither, so that a run without the cycle may go on."""
    cycle = {"name": "one_cycle", "one_cycle": {"momentum": [0.6, 0.9]}}
    config = TrainConfig.model_validate({"schedule": cycle, "optim": {"name": "muon"}, "num_epochs": 3})
    with fresh(Toy(None), config) as fit:
        steps, at, seen = Steps(fit, fit.total), fit.stepper.momentum_at, []
        assert at is not None
        for step in range(fit.total):
            steps.take(fit.lr(step))
            groups = fit.state.optimizer.param_groups
            assert {group["momentum"] if group["muon"] else group["betas"][0] for group in groups} == {at(step)}
            assert all(group["muon"] or group["betas"][1] == 0.95 for group in groups)
            seen.append(at(step))
        assert (seen[0], seen[-1]) == (0.9, 0.9) and min(seen) < 0.7
        assert "groups" not in fit.state.state_dict()["optimizer"]


@given(
    values=st.lists(st.floats(0.01, 100), min_size=1, max_size=40),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(0, 3),
)
def test_plateau_equals_torch(values, mode, patience):
    config = PlateauConfig(mode=mode, patience=patience, factor=0.5, min_lr=0.01)
    o = optimizer()
    expected = theirs.ReduceLROnPlateau(o, mode=mode, patience=patience, factor=0.5, min_lr=0.01, eps=0)
    ours = Plateau(config, LR)
    for value in values:
        ours.update(value)
        expected.step(value)
        assert ours.scale * LR == pytest.approx(o.param_groups[0]["lr"], rel=1e-12)


@pytest.mark.parametrize(("mode", "first"), [("min", math.inf), ("max", -math.inf)])
def test_plateau_that_begins_at_infinity_equals_torch(mode, first):
    o, ours = optimizer(), Plateau(PlateauConfig(mode=mode, patience=1, factor=0.5, min_lr=0.0), LR)
    expected = theirs.ReduceLROnPlateau(o, mode=mode, patience=1, factor=0.5, eps=0)
    for value in [first, first, 3.0, 2.0, 2.0, 2.0, 2.0, 4.0, 1.0]:
        ours.update(value)
        expected.step(value)
        assert ours.scale * LR == pytest.approx(o.param_groups[0]["lr"], rel=1e-12)
    assert ours.best == expected.best


def test_plateau_wants_a_negative_metric_to_get_better():
    """Where torch does not: best (1 - threshold) is above a negative best, so that worse values improve on it."""
    o, ours = optimizer(), Plateau(PlateauConfig(patience=0, factor=0.5, threshold=1e-3, min_lr=0.0), LR)
    expected = theirs.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=1e-3, eps=0)
    for value in [-1.0, -0.9995, -0.999, -0.9985]:
        ours.update(value)
        expected.step(value)
    assert expected.best == -0.9985 and o.param_groups[0]["lr"] == LR, "torch has seen nothing but improvements"
    assert ours.best == -1.0 and ours.scale == 0.125
    ours.update(-1.002)
    assert (ours.best, ours.scale) == (-1.002, 0.125), "better by more than the threshold"


def test_plateau_counts_nan_as_no_improvement():
    ours = Plateau(PlateauConfig(patience=1), LR)
    for _ in range(2):
        ours.update(math.nan)
    assert (ours.scale, ours.best) == (0.5, None)


# --- Published formulas


def test_inverse_sqrt_is_the_transformers_schedule():
    """Vaswani et al. 2017, eq. 3, with step s + 1, warmup W + 1 and d^-0.5 such that the peak is lr."""
    warmup = 40
    lr_at = schedule(ScheduleConfig(name="inverse_sqrt", warmup_steps=warmup - 1), LR, 500, Epochs(10))
    expected = [
        LR * warmup**0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 501)
    ]  # lrate = d^-0.5 min(step^-0.5, step warmup^-1.5), whose maximum is d^-0.5 warmup^-0.5
    assert [lr_at(step) for step in range(500)] == pytest.approx(expected, rel=1e-12)


@rounds(("shape", "f"), [("sqrt", lambda q: 1 - q**0.5), ("linear", lambda q: 1 - q)])
def test_wsd_is_the_papers(shape, f):
    """Hägele et al. 2024, eq. 1: eta_max n/N_warmup, eta_max, f(n, N, N_decay) eta_max, with f of eqs. 2 and 3."""
    total, warmup, decay = 200, 20, 40
    config = ScheduleConfig(name="wsd", warmup_steps=warmup - 1, decay_ratio=0.2, decay_shape=shape)
    lr_at = schedule(config, LR, total, Epochs(10))

    def published(n: int) -> float:
        if n <= warmup:
            return LR * n / warmup
        return LR if n <= total - decay else LR * f((n - (total - decay)) / decay)

    assert [lr_at(n - 1) for n in range(1, warmup + 1)] == pytest.approx([published(n) for n in range(1, warmup + 1)])
    assert [lr_at(n) for n in range(warmup, total + 1)] == pytest.approx(
        [published(n) for n in range(warmup, total + 1)]
    )


def test_the_batch_size_scales_the_peak_where_asked():
    assert scaled_lr(ScheduleConfig(), 0.1, 1024) == 0.1
    assert scaled_lr(ScheduleConfig(scale_lr="linear"), 0.1, 1024) == pytest.approx(0.4)
    assert scaled_lr(ScheduleConfig(scale_lr="sqrt"), 0.1, 1024) == pytest.approx(0.2)
    assert scaled_lr(ScheduleConfig(scale_lr="sqrt", base_batch_size=64), 0.1, 16) == pytest.approx(0.05)


@rounds(
    ("given", "steps"),
    [({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.25}, 50), ({"warmup_epochs": 1.5}, 30), ({}, 0)],
)
def test_the_warmups_length_in_steps(given, steps):
    assert warmup_length(ScheduleConfig(**given), 200, Epochs(20)) == steps


# --- In a search, and of the user's own


class Config(Frozen):
    train: TrainConfig = TrainConfig()


PATH = "train.schedule."
DIMENSIONS = {
    "min_lr": Float(0.0, 1e-3),
    "num_cycles": Int(1, 5),
    "cycle_mult": Float(1.0, 3.0),
    "power": Float(0.5, 3.0),
    "gamma": Float(0.05, 1.0, log=True),
    "step_size": Float(0.5, 10.0),
    "milestones": Choice([[1, 2], [5]]),
    "timescale": Float(1.0, 1000.0, log=True),
    "decay_ratio": Float(0.05, 0.5),
    "decay_shape": Choice(["sqrt", "linear", "cosine"]),
    "cycle_mode": Choice(["triangular", "exp_range"]),
    "one_cycle.pct_start": Float(0.1, 0.5),
    "plateau.factor": Float(0.1, 0.9),
}


def test_every_schedule_with_all_its_fields_is_searched_in_one_space():
    """Conditions on the name keep every configuration valid; without them each has its defaults."""
    space = {PATH + "name": Choice(list(NAMES)), PATH + "warmup_ratio": Float(0.0, 0.3)}
    for field, dimension in DIMENSIONS.items():
        owners = [name for name in NAMES if field.partition(".")[0] in OWN_FIELDS[name]]
        when = {PATH + "name": [name for name in owners if (name, field) != ("cyclical", "gamma")]}
        space[PATH + field] = replace(dimension, when=when)
    study = a_study(space)
    seen = set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        point = torch.rand(len(study.space), generator=generator).tolist()
        config = study.build(study.space.decode(study.space.from_unit(point))).train
        lr_at = schedule(config.schedule, LR, 100, Epochs(10))
        assert all(0 <= lr_at(step) <= LR for step in range(100))
        seen.add(config.schedule.name)
    assert seen == set(NAMES) == set(SCHEDULES)


def a_study(space):
    from hpo import Objective, Study

    study = Study("s", Config(), "x:Y", Space(space), [Objective("val/loss", "minimize")])
    return study.configure({})


@rounds(
    ("given", "message"),
    [
        (
            {"name": "cosine", "power": 2.0},
            "power=2.0 is not read by cosine, whose own fields are min_lr: leave it out",
        ),
        ({"name": "constant", "min_lr": 0.0}, "whose own fields are none"),
        ({"name": "wsd", "one_cycle": {"pct_start": 0.4}}, r"one_cycle.\* is not read by wsd"),
        ({"name": "cyclical", "gamma": 0.9}, "gamma is read only with cycle_mode=exp_range"),
        ({"warmup_power": 2.0, "warmup_steps": 2}, r"warmup_power=2.0 is read only with schedule\.warmup=polynomial"),
        ({"base_batch_size": 64}, r"base_batch_size=64 is read only with schedule\.scale_lr=linear or sqrt"),
        ({"name": "one_cycle", "warmup": "cosine"}, "does not apply to one_cycle"),
        ({"name": "multi_step", "milestones": (3, 2)}, "must increase"),
        ({"name": "one_cycle", "one_cycle": {"momentum": (0.9, 0.8)}}, r"momentum is \[0.9, 0.8\]: give the lower one"),
        ({"name": "cosin"}, "choose one of constant, cosine"),
    ],
)
def test_what_would_be_ignored_is_refused_in_one_sentence(given, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({"schedule": given})


CYCLE = {"name": "one_cycle", "one_cycle": {"momentum": [0.85, 0.95]}}


@rounds("name", OPTIMIZERS)
def test_a_momentum_that_an_optimizer_lacks_is_not_cycled(name):
    if OPTIMIZERS[name].momentum:
        assert TrainConfig.model_validate({"optim": {"name": name}, "schedule": CYCLE}).schedule.cycles_momentum
        return
    assert name in ("adafactor", "schedule_free")
    message = f"optim.name={name} has none that can change: choose one of sgd, adam.*or leave schedule.one_cycle.momen"
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({"optim": {"name": name}, "schedule": CYCLE})


@rounds(
    ("given", "message"),
    [
        ({"name": "sgd", "momentum": 0.9}, "optim.momentum is set, and schedule.one_cycle.momentum sets it.*leave opt"),
        ({"betas": [0.9, 0.99]}, "optim.betas is set.*leave optim.betas out and set optim.beta2 for the second"),
        ({"beta1": 0.9}, "optim.beta1 is set"),
        ({"name": "mine:Optimizer"}, "optim.name=mine:Optimizer has none that can change"),
    ],
)
def test_a_momentum_that_the_schedule_sets_is_set_once(given, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({"optim": given, "schedule": CYCLE})


def module_with(monkeypatch, **functions) -> None:
    monkeypatch.setitem(sys.modules, "mine", module := types.ModuleType("mine"))
    module.__file__ = "mine.py"
    vars(module).update(functions)


def test_a_function_of_the_users_own(monkeypatch):
    def halving(c, run):
        return lambda step: run.lr * 2 ** -(c.own("options")["rate"] * run.progress(step))

    module_with(monkeypatch, halving=halving)
    config = ScheduleConfig(name="mine:halving", options={"rate": 2.0}, warmup_steps=3)
    lr_at = schedule(config, LR, 103, Epochs(10))
    assert [lr_at(s) for s in (0, 3, 53, 103)] == pytest.approx([LR / 4, LR, LR / 2, LR / 4])


@rounds(
    ("name", "message"),
    [
        ("mine:missing", "mine.py has no 'missing'"),
        ("nowhere.at_all:f", "module 'nowhere.at_all' does not exist"),
        ("mine:negative", "gives the rate -1.0 at step 0"),
        ("mine:number", "returns 1.0: return a function of the step"),
        ("mine:alone", r"too many positional arguments\): let it take two arguments, the configuration and the run"),
        ("mine:a_text", "gives the rate '0.1' at step 0: make it a number"),
        ("mine:of_two", r"missing a required argument: 'b'\): let it take one argument, the step"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(monkeypatch, name, message):
    module_with(
        monkeypatch,
        negative=lambda c, run: lambda step: -1.0,
        number=lambda c, run: 1.0,
        alone=lambda step: 0.1,
        a_text=lambda c, run: lambda step: "0.1",
        of_two=lambda c, run: lambda a, b: 0.1,
    )
    with pytest.raises(ConfigError, match=message):
        schedule(ScheduleConfig(name=name), LR, 10, Epochs(1))


@rounds(
    ("given", "told"),
    [
        ({"warmup_steps": 40}, True),
        ({"warmup_steps": 39}, False),  # the last of the 40 updates is at the peak
        ({"warmup_epochs": 4}, True),
        ({"warmup_ratio": 0.5}, False),
        ({"name": "one_cycle"}, False),
        ({}, False),
    ],
)
def test_a_warmup_that_outlasts_the_run_is_told_where_it_stops_short(given, told):
    config, lengths = ScheduleConfig(**given), Epochs(10)
    lr_at = schedule(config, LR, 40, lengths)
    assert bool(never_warm(config, 40, lengths)) is told
    assert (max(lr_at(s) for s in range(40)) < LR * (1 - 1e-9)) is told
