"""When is a loss a jump: the robust z-score, and what it must not take for one."""

from __future__ import annotations

import math
import random
import re

import pytest
from places import ROOT
from pydantic import ValidationError

from trainer.config import RollbackConfig, TrainConfig
from trainer.gradients.loss_spikes import Spikes


def seen(losses, **options) -> Spikes:
    spikes = Spikes(RollbackConfig(enabled=True, **options))
    for loss in losses:
        spikes.add(loss, 1.0)
    return spikes


def test_the_score_is_the_distance_from_the_median_in_robust_deviations():
    spikes = seen([1.0, 2.0, 3.0, 4.0, 100.0], window=5, min_history=5)
    assert spikes.score(10.0) == pytest.approx((10.0 - 3.0) / (1.4826 * 1.0))


def test_nothing_is_judged_before_there_is_a_history():
    spikes = seen([1.0] * 3, window=8, min_history=4)
    assert not spikes.is_spike(1e9)
    spikes.add(1.0, 1.0)
    assert spikes.is_spike(1e9)
    assert spikes.is_spike(math.nan)


def test_noise_and_a_falling_loss_are_no_jumps():
    rng = random.Random(0)
    spikes = seen([])
    for step in range(2000):
        loss = 4 * math.exp(-step / 300) + 0.5 + 0.05 * rng.gauss(0, 1)
        assert not spikes.is_spike(loss), step
        spikes.add(loss, 1.0)
    assert spikes.is_spike(5.0)


def test_a_constant_loss_that_moves_a_little_is_no_jump():
    assert not seen([1.0] * 64).is_spike(1.001)


def test_a_loss_within_the_recent_range_is_no_jump():
    spikes = seen([0.001] * 60 + [1.3] + [0.001] * 3)
    assert spikes.score(0.94) > 8
    assert not spikes.is_spike(0.94)
    assert spikes.is_spike(1.4)


def test_the_learning_rate_is_cut_for_a_while():
    spikes = seen([1.0] * 64, lr_factor=0.25, cooldown=10)
    spikes.rolled_back(100)
    assert [spikes.lr_scale(step) for step in (99, 100, 109, 110)] == [0.25, 0.25, 0.25, 1.0]


def test_it_goes_on_from_its_state():
    one, other = seen([1.0, 2.0] * 10), seen([])
    one.rolled_back(20)
    other.load(one.state())
    for loss in (1.5, 9.0, 2.0):
        assert one.score(loss) == other.score(loss)
        one.add(loss, 1.0)
        other.add(loss, 1.0)
    assert one.state() == other.state()


def test_a_history_longer_than_the_window_is_refused():
    with pytest.raises(ValidationError, match="lower min_history"):
        RollbackConfig(window=8, min_history=9)


def test_the_guide_lists_every_field_with_its_default():
    text = (ROOT / "docs/guide/stability.md").read_text()
    told = dict(re.findall(r"^\| `(\w+\.\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    parts = {
        part: getattr(TrainConfig(), part) for part in ("loss_scale", "average", "early_stopping", "rollback", "guard")
    }
    assert told == {f"{part}.{field}": str(value).lower() for part, config in parts.items() for field, value in config}
