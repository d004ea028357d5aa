"""Every schedule: continuous, positive, at its peak where it should be; and equal to the closed form or torch's own."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from trainer.config import PlateauConfig, ScheduleConfig
from trainer.schedule import Plateau, schedule, warmup_length

NAMES = ("constant", "cosine", "one_cycle", "plateau")
LR = 0.3


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


@given(
    name=st.sampled_from(NAMES),
    total=st.integers(1, 3000),
    warmup=st.one_of(st.none(), st.integers(0, 4000)),
    min_lr=st.floats(0, 1),
    where=st.floats(0, 1),
)
def test_continuous_and_within_bounds(name, total, warmup, min_lr, where):
    """Over a short way h the rate moves by at most its steepest slope times h: there is no jump."""
    config = ScheduleConfig(name=name, warmup_steps=warmup, min_lr=min_lr)
    lr_at = schedule(config, LR, total, 10)
    h, step = 1e-4, where * total
    rise = warmup_length(config, total, 10)
    shortest = min([length for length in (rise, total - rise, total - 1 - rise) if length > 0] or [1])
    steepest = LR * math.pi / 2 / min(shortest, 1)
    assert abs(lr_at(step + h) - lr_at(step)) <= steepest * h + 1e-12
    assert 0 <= lr_at(step) <= LR * (1 + 1e-12)


@given(name=st.sampled_from(NAMES), total=st.integers(20, 500), warmup=st.integers(1, 10))
def test_the_peak_is_reached_once_the_warmup_is_over(name, total, warmup):
    lr_at = schedule(ScheduleConfig(name=name, warmup_steps=warmup), LR, total, 10)
    values = [lr_at(step) for step in range(total)]
    assert max(values) == values[warmup] == LR
    assert all(a < b for a, b in itertools.pairwise(values[: warmup + 1]))
    assert values[0] > 0


def test_warmup_and_cosine_equal_torch():
    total, warmup, floor = 57, 9, 0.02
    o = optimizer()
    expected = SequentialLR(
        o,
        [
            LinearLR(o, start_factor=1 / (warmup + 1), total_iters=warmup),
            CosineAnnealingLR(o, T_max=total - warmup, eta_min=floor),
        ],
        milestones=[warmup],
    )
    lr_at = schedule(ScheduleConfig(name="cosine", warmup_steps=warmup, min_lr=floor), LR, total, 10)
    assert [lr_at(step) for step in range(total)] == pytest.approx(rates(expected, total), rel=1e-9)
    assert lr_at(total) == pytest.approx(floor)


@pytest.mark.parametrize("pct_start", [0.1, 0.3, 0.65])
def test_one_cycle_equals_torch(pct_start):
    total = 100
    config = ScheduleConfig(name="one_cycle", one_cycle={"pct_start": pct_start})
    lr_at = schedule(config, LR, total, 10)
    expected = OneCycleLR(optimizer(), max_lr=LR, total_steps=total, pct_start=pct_start, cycle_momentum=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [*rates(expected, total - 1), expected.get_last_lr()[0]]
    assert [lr_at(step) for step in range(total)] == pytest.approx(values, rel=1e-9)


def test_constant_and_plateau_are_flat_after_the_warmup():
    for name in ("constant", "plateau"):
        lr_at = schedule(ScheduleConfig(name=name, warmup_steps=4), LR, 20, 10)
        assert [lr_at(step) for step in range(20)] == [LR * (s + 1) / 5 for s in range(4)] + [LR] * 16


@pytest.mark.parametrize(
    ("given", "steps"),
    [({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.25}, 50), ({"warmup_epochs": 1.5}, 30), ({}, 0)],
)
def test_the_warmups_length_in_steps(given, steps):
    assert warmup_length(ScheduleConfig(**given), total=200, steps_per_epoch=20) == steps


@given(
    values=st.lists(st.floats(0.01, 100), min_size=1, max_size=40),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(0, 3),
)
def test_plateau_equals_torch(values, mode, patience):
    config = PlateauConfig(mode=mode, patience=patience, factor=0.5, min_lr=0.01)
    o = optimizer()
    expected = ReduceLROnPlateau(o, mode=mode, patience=patience, factor=0.5, min_lr=0.01, eps=0)
    ours = Plateau(config, LR)
    for value in values:
        ours.update(value)
        expected.step(value)
        assert ours.scale * LR == pytest.approx(o.param_groups[0]["lr"], rel=1e-12)


def test_plateau_counts_nan_as_no_improvement():
    ours = Plateau(PlateauConfig(patience=1), LR)
    for _ in range(2):
        ours.update(math.nan)
    assert (ours.scale, ours.best) == (0.5, None)
