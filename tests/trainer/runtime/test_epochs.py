"""Batches that grow: where epochs lie, what a schedule and a resume make of it, and two loops written by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from hpo import Choice, Float, Objective, Study
from studies.mlp.config import Config
from trainer.config import ScheduleConfig, TrainConfig
from trainer.data import Bucketed, Loader, Mixture, TensorDataset
from trainer.errors import ConfigError, DataError
from trainer.optim.schedule import schedule
from trainer.report import Outcome
from trainer.runtime.epochs import Epochs
from trainer.runtime.seeding import derive, seed_all, shuffled
from trainer.task import Loss, Task

GROWTH = {"batch_growth": {"epochs": [2, 3], "factor": 1.5}, "batch_size": 12, "micro_batch_size": 5, "num_epochs": 5}
WINDOWS = (4, 4, 3, 2, 2)  # of 44 samples in batches of 12, 12, 18, 27 and 27


class Plain(Toy):
    """Nothing drawn while it trains, so that a loop by hand can follow."""

    augment = Task.augment

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        return self.net


def test_equals_two_loops_written_by_hand(tmp_path):
    """One for each size of batch, one after the other, under one cosine over the steps of both."""
    given: dict[str, Any] = {"batch_growth": {"epochs": [2], "factor": 2}, "num_epochs": 3, "micro_batch_size": 5}
    optim = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    trial = uninterrupted(tmp_path, task=Plain, optim=optim, schedule={"name": "cosine"}, clip={"norm": 0.3}, **given)
    seed_all(derive(0, "init"))
    net = Plain(None).model()
    seed_all(derive(0, "data"))
    x, y = Plain(None).train_set()._tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 + 4 + 2)
    losses = []

    def train(epoch: int, size: int) -> None:
        total = 0.0
        for rows in torch.tensor(shuffled(0, epoch, 44)).split(size):
            optimizer.zero_grad()
            loss = cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            cosine.step()
            total += loss.item() * len(rows)
        losses.append(total / 44)

    for epoch in (0, 1):
        train(epoch, 12)
    train(2, 24)
    for p, q in zip(trial.task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    values = trial.reporter.values
    assert trial.reporter.epochs == {4: 1, 8: 2, 10: 3}
    assert [values[step, "train/loss"] for step in (4, 8, 10)] == pytest.approx(losses, rel=1e-5)


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Trial:
    return uninterrupted(tmp_path_factory.mktemp("grown"), **GROWTH)


def test_each_epoch_has_its_own_number_of_steps_and_every_sample_once(grown):
    ends = [*itertools.accumulate(WINDOWS)]
    assert list(grown.reporter.epochs) == ends
    loader = Loader(Plain(None), TrainConfig.model_validate(GROWTH), torch.device("cpu"))
    for epoch, (windows, size) in enumerate(zip(WINDOWS, (12, 12, 18, 27, 27), strict=True)):
        read = [sum(len(y) for _, y in window) for window in loader.epoch(epoch, 0)]
        assert read == [size] * (windows - 1) + [44 - size * (windows - 1)]
        visited = [i for window in range(windows) for i in loader.sampler.indices(epoch, window)]
        assert sorted(visited) == list(range(44)) and loader.samples(1) == 44 - size


@pytest.mark.parametrize("step", range(1, sum(WINDOWS) + 1, 2))
def test_killed_before_any_step_it_ends_bit_equal(step, grown, tmp_path):
    trial = Trial(tmp_path, **GROWTH)
    assert trial.attempt(killed_at(step)) is None
    assert trial.attempt() == Outcome("complete", step=15, epoch=5)
    assert trial.digest() == grown.digest()


def test_a_factor_of_one_changes_nothing(tmp_path):
    plain = {key: value for key, value in GROWTH.items() if key != "batch_growth"} | {
        "schedule": {"name": "exponential"}
    }
    digests = [
        uninterrupted(tmp_path / str(len(growth)), **plain, **growth).digest()
        for growth in ({}, {"batch_growth": {"epochs": [1, 3], "factor": 1}})
    ]
    assert digests[0] == digests[1]


def test_the_micro_batch_stays_and_auto_follows_the_largest(tmp_path):
    config = {key: value for key, value in GROWTH.items() if key != "micro_batch_size"}
    sizes = {
        asked: Loader(
            Plain(None), TrainConfig.model_validate(config | {"micro_batch_size": asked}), torch.device("cpu")
        ).sampler.micro_batch_size
        for asked in (None, 5, 20, 40, "auto")
    }
    assert sizes == {None: 12, 5: 5, 20: 20, 40: 27, "auto": 27}


def test_a_rollback_finds_the_checkpoints_of_epochs_of_any_length(tmp_path):
    class Jumps(Plain):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return Loss(loss.sum * (1e4 if round(self.progress * 15) == 12 else 1.0), loss.count)

    rollback = {"enabled": True, "threshold": 20.0, "min_history": 4}
    trial = uninterrupted(tmp_path, task=Jumps, **GROWTH, rollback=rollback, checkpoint={"every_epochs": 1})
    [jumped] = [fields for kind, fields in trial.reporter.events if kind == "loss_jumped"]
    assert jumped["step"] == 12 and "back to step 11," in jumped["action"]


def test_a_checkpoint_inside_an_epoch_needs_the_same_growth(tmp_path):
    trial = Trial(tmp_path / "from", **GROWTH)
    trial.attempt(killed_at(11))
    [ref] = trial.reporter.committed[:1]
    other = Trial(tmp_path / "to", **GROWTH | {"batch_growth": {"epochs": [2]}})
    with pytest.raises(ConfigError, match=r"inside an epoch of 3 steps, and .* has 2: keep batch_size, batch_growth"):
        other.attempt(resume_from=str(ref.path))


# --- Epochs


phases = st.lists(st.integers(1, 20), min_size=1, max_size=12)


@given(lengths=phases, where=st.floats(0, 1))
def test_steps_and_epochs_are_those_that_are_counted(lengths, where):
    changes = [(i, n) for i, (before, n) in enumerate(itertools.pairwise(lengths), 1) if n != before]
    epochs = Epochs(lengths[0], tuple(changes))
    starts = [0, *itertools.accumulate(lengths)]
    assert [epochs.length(i) for i in range(len(lengths))] == lengths
    assert [epochs.step(i) for i in range(len(starts))] == starts
    assert [epochs.closed_by(step) for step in range(starts[-1] + 1)] == [
        starts.index(step) if step in starts else None for step in range(starts[-1] + 1)
    ]
    step = where * starts[-1]
    assert epochs.step(epochs.epoch(step)) == pytest.approx(step, abs=1e-9)


def test_a_schedule_by_epochs_follows_them():
    """Epochs of 4, 4, 3, 2 and 2 steps: milestones, warmups and steps given in epochs lie where those begin."""
    epochs = Epochs.of(44, TrainConfig.model_validate(GROWTH))
    assert epochs.step(5) == 15

    def rates(**config: Any) -> list[float]:
        lr_at = schedule(ScheduleConfig(**config), 1.0, 15, epochs)
        return [lr_at(step) for step in range(15)]

    of_epoch = [epoch for epoch, length in enumerate(WINDOWS) for _ in range(length)]
    assert rates(name="step", gamma=0.5, step_size=1) == [0.5**epoch for epoch in of_epoch]
    milestones = rates(name="multi_step", gamma=0.5, milestones=(2, 4))
    assert milestones == [0.5 ** ((epoch >= 2) + (epoch >= 4)) for epoch in of_epoch]
    parts = [i / length for length in WINDOWS for i in range(length)]
    expected = [0.5 ** (epoch + part) for epoch, part in zip(of_epoch, parts, strict=True)]
    assert rates(name="exponential", gamma=0.5) == pytest.approx(expected)
    assert rates(name="constant", warmup_epochs=2.5)[:10] == pytest.approx(
        [(i + 1) / 11 for i in range(10)]
    )  # 9.5 is 10


# --- What is asked for


def test_a_search_may_vary_it():
    study = Study(
        "s",
        config=Config(),
        task="studies.mlp.task:MlpTask",
        space={"train.batch_growth.factor": Float(1.0, 4.0), "train.batch_growth.epochs": Choice([(2,), (2, 4)])},
        objectives=[Objective("val/loss")],
    )
    assert {"train.batch_growth.factor", "train.batch_growth.epochs"} == set(study.space.paths)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"epochs": [3, 2]}, r"epochs \[3, 2\] must increase"),
        ({"epochs": [0]}, "greater than or equal to 1"),
        ({"epochs": [1], "factor": 0.5}, "greater than or equal to 1"),
        ({"factor": 3}, r"factor=3.0 is read only with batch_growth\.epochs:"),
    ],
)
def test_what_makes_no_sense_is_refused(given, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TrainConfig.model_validate({"batch_growth": given})


def test_a_mixture_of_what_goes_by_batch_size_is_refused():
    data = TensorDataset(torch.randn(40, 6), torch.zeros(40, dtype=torch.long))

    class Mixed(Plain):
        inside = True

        def train_set(self):
            bucketed = Bucketed(data, list(range(40)))
            return Mixture([(bucketed, 1.0)]) if self.inside else Bucketed(Mixture([(data, 1.0)]), lambda index: index)

    config = TrainConfig.model_validate(GROWTH)
    with pytest.raises(DataError, match=r"train.batch_growth .* a source within Mixture .* around the mixture"):
        Loader(Mixed(None), config, torch.device("cpu"))
    Mixed.inside = False
    assert len(list(Loader(Mixed(None), config, torch.device("cpu")).epoch(3, 0))) == 2
