"""Memory that is bounded: what a step needs is asked before the first one."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer.errors import ConfigError, TrainerError
from trainer.memory import bound

pytestmark = pytest.mark.whole

MiB = 2**20


class Wide(Toy):
    """What a sample costs is known: 6 features become 4096."""

    samples = 64

    def model(self):
        self.net = nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 3))
        return self.net


class Peeks(Toy):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        assert loss.sum.item() >= 0
        return loss


class Converted(Toy):
    def model(self):
        return super().model().double()


WIDE = {"batch_size": 64, "micro_batch_size": None, "num_epochs": 1}


def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path):
    trial = Trial(tmp_path, Wide, **WIDE, memory_limit="2MiB")
    outcome = trial.attempt()
    assert outcome.kind == "out_of_memory" and outcome.step == 0
    size = int(outcome.error.split("train.micro_batch_size=")[1].split()[0])
    assert size < 64 and "a micro-batch of 64 needs" in outcome.error and "optimizer" in outcome.error
    assert trial.reporter.values == {}
    fits = Trial(tmp_path / "fits", Wide, **WIDE | {"micro_batch_size": size, "memory_limit": "2MiB"})
    assert fits.attempt().kind == "complete"


def test_auto_chooses_what_would_fit_and_trains_the_same(tmp_path):
    auto = Trial(tmp_path / "a", Wide, **WIDE | {"micro_batch_size": "auto"}, memory_limit="2MiB")
    assert auto.attempt().kind == "complete"
    [event] = [fields for kind, fields in auto.reporter.events if kind == "memory_estimate"]
    given = Trial(tmp_path / "b", Wide, **WIDE | {"micro_batch_size": event["micro_batch_size"]})
    assert given.attempt().kind == "complete"
    assert event["micro_batch_size"] < 64 and event["limit"] == 2 * MiB
    assert auto.reporter.values.pop((1, "system/memory_estimate_mb")) == event["peak"] / MiB
    assert auto.digest() == given.digest()
    assert not any(kind == "memory_estimate" for kind, _ in given.reporter.events), "only where there is a bound"


def test_auto_resumes_bit_for_bit(tmp_path):
    settings = {"micro_batch_size": "auto", "memory_limit": "1MiB"}
    whole = uninterrupted(tmp_path / "whole", **settings)
    cut = Trial(tmp_path / "cut", **settings)
    assert cut.attempt(killed_at(3)) is None
    assert cut.attempt().kind == "complete"
    assert cut.digest() == whole.digest()


@pytest.mark.parametrize(
    ("task", "settings", "sentence"),
    [
        (Toy, {"micro_batch_size": "auto"}, "needs a bound on a CPU: set train.memory_limit"),
        (Peeks, {"memory_limit": "1GiB"}, "the loss looks at values"),
        (Converted, {"memory_limit": "1GiB"}, "make the layers so, or leave train.memory_limit out"),
    ],
)
def test_what_cannot_be_estimated_is_refused(tmp_path, task, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Trial(tmp_path, task, **settings).attempt()


class Bare(Toy):
    def loss(self, model, batch):
        return super().loss(model, batch).sum


class Buggy(Toy):
    def loss(self, model, batch):
        return super().loss(model, (*batch, "one too many"))


class Sparse(Toy):
    def model(self):
        net = super().model()
        for name, wide in (("coo", torch.eye(6).to_sparse()), ("csr", torch.eye(6).to_sparse_csr())):
            net.register_buffer(name, wide, persistent=False)
        return net

    def loss(self, model, batch):
        x, y = batch
        return super().loss(model, (torch.sparse.mm(model.coo, x.T).T, y))


@pytest.fixture
def unbounded_gpu(monkeypatch):
    """As on a GPU whose bound nobody has set: what a step needs is estimated in every fit."""
    monkeypatch.setattr(bound, "memory_limit", lambda config, device: config.memory_limit or 1 << 40)


@pytest.mark.parametrize(
    ("task", "error", "sentence", "reason"),
    [
        (Bare, TrainerError, r"loss\(\) of Bare .* returned a Tensor", r"TrainerError: loss\(\) of Bare"),
        (Buggy, ValueError, "too many values to unpack", "ValueError: too many values"),
    ],
)
@pytest.mark.usefixtures("unbounded_gpu")
def test_a_task_at_fault_hears_of_it_from_its_first_step(tmp_path, task, error, sentence, reason):
    trial = Trial(tmp_path, task)
    with pytest.raises(error, match=sentence):
        trial.attempt()
    assert re.match(reason, dict(trial.reporter.events)["memory_estimate"]["reason"])


@pytest.mark.usefixtures("unbounded_gpu")
def test_what_cannot_be_estimated_trains_where_nobody_asked(tmp_path):
    trial = Trial(tmp_path, Peeks)
    assert trial.attempt().kind == "complete"
    assert "memory_limit" in dict(trial.reporter.events)["memory_estimate"]["reason"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")  # torch's, of what is made here
@pytest.mark.usefixtures("unbounded_gpu")
def test_sparse_tensors_are_in_the_estimate(tmp_path):
    trial = Trial(tmp_path, Sparse)
    assert trial.attempt().kind == "complete"
    assert dict(trial.reporter.events)["memory_estimate"]["peak"] > 0


def test_what_has_a_shape_by_its_values_alone_is_refused_in_a_sentence(tmp_path):
    class Chosen(Toy):
        def loss(self, model, batch):
            x, y = batch
            return super().loss(model, (x[y >= 0], y))

    with pytest.raises(ConfigError, match=r"cannot be estimated: leave train\.memory_limit out"):
        Trial(tmp_path, Chosen, memory_limit="1GiB").attempt()
