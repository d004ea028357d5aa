"""Batch norm never measures one sample: passes are cut otherwise, or it is told before the first step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trainer_runs import Toy, Trial, uninterrupted

from trainer.config import TrainConfig
from trainer.data.loader import Sampler
from trainer.errors import ConfigError

WHOLE = {"micro_batch_size": None, "num_epochs": 1, "batch_size": 16}


def samples_of(count: int, base: type[Toy] = Toy) -> type[Toy]:
    return type("Counted", (base,), {"samples": count})


class Watched(Toy):
    """It keeps how many samples each pass of batch norm has had."""

    def model(self) -> nn.Module:
        net = super().model()
        self.passes: list[int] = []
        net[1].register_forward_pre_hook(self.look)
        return net

    def look(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        if module.training:
            self.passes.append(len(args[0]))


class Wide(Watched):
    """Of which memory holds a few samples: 6 features become 4096."""

    samples = 64

    def model(self) -> nn.Module:
        self.passes = []
        self.net = nn.Sequential(nn.Linear(6, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 3))
        self.net[1].register_forward_pre_hook(self.look)
        return self.net


class Pictures(Toy):
    """Of images batch norm measures a sample's positions."""

    samples = 17

    def model(self) -> nn.Module:
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(24, 3)
        )
        return self.net


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 20),
    micro=st.none() | st.integers(1, 20),
    shares=st.integers(1, 3),
    growth=st.booleans(),
    drop_last=st.booleans(),
)
def test_what_is_told_of_single_samples_is_what_the_passes_have(size, batch_size, micro, shares, growth, drop_last):
    """By brute force: every pass of every epoch and share."""
    config = {"batch_size": batch_size, "micro_batch_size": micro, "drop_last": drop_last}
    config |= {"batch_growth": {"epochs": [1], "factor": 2}} if growth else {}
    samplers = [Sampler(range(size), TrainConfig.model_validate(config), i, shares, 2) for i in range(shares)]
    single, seen = False, []
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.epoch = epoch
            for window in range(sampler.windows):
                pieces = sampler.micro_batches(window, sampler.share)
                assert all(len(piece) <= sampler.micro_batch_size for piece in pieces)
                single |= any(len(piece) == 1 for piece in pieces)
                seen += [(epoch, i) for piece in pieces for i in piece]
    whole = [(epoch, i) for epoch in (0, 1) for i in range(size)]
    assert len(seen) == len(set(seen)) and set(seen) <= set(whole)
    if not drop_last:
        assert set(seen) == set(whole)
    if growth or batch_size == samplers[0].batch_size_at(1):
        assert (samplers[0].single(samplers[0].micro_batch_size) is not None) == single


@pytest.mark.parametrize("micro_batch_size", [5, 4])
def test_a_window_is_cut_so_that_no_pass_has_one_sample(micro_batch_size, tmp_path):
    """Of 11 samples 5, 4 and 2, and not 5, 5 and 1; of 9 in fours 4, 3 and 2."""
    samples = {5: 11, 4: 9}[micro_batch_size]
    trial = uninterrupted(tmp_path, task=samples_of(samples, Watched), **WHOLE | {"micro_batch_size": micro_batch_size})
    assert trial.task.passes == {5: [5, 4, 2], 4: [4, 3, 2]}[micro_batch_size]


def test_a_model_without_batch_norm_takes_one_sample(tmp_path):
    class Plain(Toy):
        samples = 17

        def model(self) -> nn.Module:
            self.net = nn.Linear(6, 3)
            return self.net

    assert Trial(tmp_path, Plain, **WHOLE).attempt().kind == "complete"


def test_images_of_one_sample_are_measured_by_their_positions(tmp_path):
    assert Trial(tmp_path, Pictures, **WHOLE).attempt().kind == "complete"


@pytest.mark.parametrize(
    "given", [{"batch_size": 16}, {"batch_size": 8, "batch_growth": {"epochs": [1]}, "num_epochs": 2}]
)
def test_a_last_window_of_one_sample_is_told_before_the_first_step(given, tmp_path):
    trial = Trial(tmp_path, samples_of(17), **WHOLE | given)
    with pytest.raises(ConfigError) as error:
        trial.attempt()
    for words in (
        "of the 17 samples",
        "some window holds 1,",
        f"train.batch_size={given['batch_size']}",
        "drop_last=true",
    ):
        assert words in str(error.value)
    assert trial.reporter.values == {}


def test_drop_last_leaves_the_last_window_out_where_it_is_not_full(tmp_path):
    """As if the samples of it had not been there; what the epoch leaves out is another in each."""
    trial = uninterrupted(tmp_path, task=samples_of(17, Watched), **WHOLE | {"drop_last": True, "num_epochs": 3})
    assert trial.task.passes == [16, 16, 16]
    assert trial.reporter.epochs == {1: 1, 2: 2, 3: 3}
    few = uninterrupted(tmp_path / "few", task=samples_of(5, Watched), **WHOLE | {"drop_last": True})
    assert few.task.passes == [5], "the only window of an epoch is kept"


def test_the_pass_of_one_sample_that_is_tried_leaves_no_trace(tmp_path):
    trial = uninterrupted(tmp_path, task=Pictures, **WHOLE)
    assert trial.task.net[2].num_batches_tracked.item() == 2, "a window of 16 and one of 1"


@pytest.mark.parametrize("limit", ["1KiB", "900KiB"])
def test_a_memory_limit_below_two_samples_is_out_of_memory(limit, tmp_path):
    outcome = Trial(tmp_path, Wide, **WHOLE, memory_limit=limit).attempt()
    assert outcome.kind == "out_of_memory" and "not even 2 fits" in outcome.error
    auto = Trial(tmp_path / "auto", Wide, **WHOLE | {"micro_batch_size": "auto"}, memory_limit=limit).attempt()
    assert auto.kind == "out_of_memory"


def test_what_is_halved_never_leaves_one_sample_over(tmp_path):
    """Windows of 13 and 12 samples cannot be cut into twos."""
    sampler = Sampler(range(25), TrainConfig(batch_size=13), least=2)
    assert (sampler.halved(13), sampler.halved(7), sampler.halved(4), sampler.halved(3)) == (7, 4, 3, 3)
    even = Sampler(range(26), TrainConfig(batch_size=6), least=2)
    assert (even.halved(6), even.halved(3), even.halved(2)) == (3, 2, 2)
    plain = Sampler(range(25), TrainConfig(batch_size=13))
    assert (plain.halved(3), plain.halved(2), plain.halved(1)) == (2, 1, 1)
    auto = Trial(tmp_path, Wide, **WHOLE | {"micro_batch_size": "auto", "batch_size": 13}, memory_limit="1500KiB")
    assert auto.attempt().kind == "complete"
    assert min(auto.task.passes) > 1 and max(auto.task.passes) < 13
