"""Operations against counts by hand, and the utilisation that is reported."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainer_runs import Toy, Trial, uninterrupted

from hpo.ledger.names import machine_dependent
from trainer.errors import ConfigError
from trainer.metrics.flops import flops
from trainer.task import Loss


def test_a_perceptron_has_the_operations_of_its_products():
    """6 -> 12 -> 3: two a weight and sample forward, two for its gradient, two for that of a later layer's input."""
    task = Toy(None)
    x, y = torch.randn(7, 6), torch.zeros(7, dtype=torch.long)
    assert flops(task, (x, y)) == 7 * (2 * (2 * 6 * 12) + 3 * (2 * 12 * 3))


class Attentive(Toy):
    def model(self) -> nn.Module:
        return nn.Linear(8, 24)

    def loss(self, model, batch):
        q, k, v = model(batch).chunk(3, -1)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return Loss(out.sum(), len(batch))


def test_attention_counts():
    """Of length 5 and width 8, from inputs [2, 1, 5, 8]: two products forward, four backward."""
    linear, attention = 2 * (2 * 2 * 5 * 8 * 24), 3 * 2 * (2 * 2 * 5 * 5 * 8)
    assert flops(Attentive(None), torch.randn(2, 1, 5, 8)) == linear + attention


@pytest.mark.parametrize("given", [{}, {"activations": {"checkpoint": "full"}}])
def test_utilisation_is_the_models_operations_over_the_peaks(given, tmp_path):
    values = uninterrupted(tmp_path, peak_tflops=1e-6, **given).reporter.values
    each = 2 * (2 * 6 * 12) + 3 * (2 * 12 * 3)
    for step in (4, 8):
        assert values[step, "train/mfu"] == pytest.approx(values[step, "train/samples_per_sec"] * each / 1e6)


class Looks(Toy):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.sum * (1.0 if loss.sum.item() > 0 else 2.0), loss.count)


@pytest.mark.parametrize(
    ("task", "peak", "sentence"),
    [
        (Toy, "auto", "knows no peak of a CPU in fp32: give the teraflops"),
        (Looks, 1.0, "the loss looks at values, .* leave train.peak_tflops out"),
    ],
)
def test_what_cannot_be_known_is_refused(task, peak, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        Trial(tmp_path, task=task, peak_tflops=peak).attempt()


def test_no_digest_has_what_the_machine_decides():
    machine = ("train/mfu", "train/tokens_per_sec", "train/samples_per_sec", "train/gpu_util", "system/x", "time/x")
    assert all(map(machine_dependent, machine)) and not any(map(machine_dependent, ("train/loss", "val/a_per_sec")))
