"""The gradient penalty of a configuration against slopes computed sample by sample in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from trainer_runs import Toy, Trial, uninterrupted

from trainer.config import GradientConfig, TrainConfig
from trainer.data import TensorDataset
from trainer.errors import ConfigError
from trainer.gradients.penalty import penalised
from trainer.runtime.seeding import derive, seed_all, shuffled
from trainer.task import Loss


class Double(Toy):
    """In float64, with neither dropout nor batch norm nor augmentation."""

    augment = Toy.__base__.augment  # type: ignore[assignment]

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        return self.net

    def train_set(self) -> TensorDataset:
        x, y = super().train_set()[:]
        return TensorDataset(x.double(), y)

    def evaluate(self, model):
        return {}


@pytest.mark.parametrize(("of", "norm"), [("output", 1.0), ("output", 0.0), ("loss", 0.0), ("loss", 0.5)])
def test_equals_the_loop_written_by_hand(of, norm, tmp_path):
    """Windows of 12, and one of 8, in uneven micro-batches of 5: the penalty's mean is over the window, too."""
    gradients = {"penalty": 3.0, "penalty_norm": norm, "penalty_of": of}
    optim = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    trial = uninterrupted(tmp_path, task=Double, optim=optim, clip={"norm": None}, gradients=gradients)
    seed_all(derive(0, "init"))
    net = Double(None).model()
    seed_all(derive(0, "data"))
    data, metric = Double(None).train_set(), []

    def penalty(params: dict[str, Any], x: Any, y: Any) -> Any:
        def of_one(x: Any) -> Any:
            out = functional_call(net, params, (x,))
            return out.sum() if of == "output" else cross_entropy(out, y)

        return (grad(of_one)(x).norm() - norm) ** 2

    for epoch in range(2):
        total = 0.0
        for rows in torch.tensor(shuffled(0, epoch, 44)).split(12):
            x, y = data[rows.tolist()]
            params = dict(net.named_parameters())
            each = vmap(penalty, in_dims=(None, 0, 0))(params, x, y)
            slopes = torch.autograd.grad(cross_entropy(net(x), y) + 3.0 * each.mean(), list(params.values()))
            with torch.no_grad():
                for p, g in zip(params.values(), slopes, strict=True):
                    p -= 0.1 * g
            total += each.sum().item()
        metric.append(total / 44)
    for p, q in zip(trial.task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    reported = [v for (_, key), v in sorted(trial.reporter.values.items()) if key == "train/gradient_penalty"]
    assert reported == pytest.approx(metric, rel=1e-10)


def test_inputs_count_wherever_they_are_and_every_call_of_the_model():
    """By keyword and inside a dict, of two calls, beside integers and a call without gradient, which count not."""

    class Two(nn.Module):
        def forward(self, batch, *, scale):
            return batch["x"] * scale + batch["index"]

    model = Two()
    weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    x, scale = torch.randn(2, 4, 3, dtype=torch.float64)

    def loss() -> Loss:
        with torch.no_grad():
            model({"x": x, "index": torch.arange(3)}, scale=scale)
        out = [model({"x": part, "index": torch.arange(3)}, scale=scale[: len(part)] * weight) for part in (x, x[:1])]
        return Loss(sum(o.sum() for o in out), 8.0, {"other": weight.detach()})

    found = penalised(GradientConfig(penalty=0.5, penalty_norm=0.0), model, loss)
    # The second input, `scale * weight`, is the task's own tensor: the slope by it is x.
    squares = torch.cat([((2 * scale[:n]) ** 2 + x[:n] ** 2).sum(1) for n in (4, 1)])
    torch.testing.assert_close(found.terms["gradient_penalty"], 8 * squares.mean())
    torch.testing.assert_close(found.sum - loss().sum, 0.5 * 8 * squares.mean())
    assert found.count == 8.0 and found.terms["other"] == 2.0
    assert not model._forward_hooks and not model._forward_pre_hooks


class Attentive(Double):
    """Attention, whose fused kernels have no second derivative."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(6, 9)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return scaled_dot_product_attention(q, k, v)[:, 0]

    def model(self) -> nn.Module:
        self.net = self.Net().double()
        return self.net


def test_attention_is_differentiated_twice(tmp_path):
    trial = uninterrupted(tmp_path, task=Attentive, gradients={"penalty": 1.0})
    assert trial.reporter.values[8, "train/gradient_penalty"] >= 0


class Tokens(Double):
    def loss(self, model, batch):
        out = model[2](nn.functional.one_hot(batch[1], 12).double() @ torch.eye(12).double())
        return Loss(out.sum(), len(out))


class Ctc(Double):
    def loss(self, model, batch):
        out = model(batch[0])[:, None].log_softmax(-1)
        one = torch.ones(1, dtype=torch.long)
        return Loss(nn.functional.ctc_loss(out, one[None], one * len(out), one, reduction="sum"), len(out))


@pytest.mark.parametrize(
    ("task", "sentence"),
    [(Tokens, "gets none: leave it out"), (Ctc, r"a part of the model has none \(.*ctc.*: leave it out")],
)
def test_what_has_no_slope_is_refused_in_one_sentence(task, sentence, tmp_path):
    with pytest.raises(ConfigError, match=r"^train.gradients.penalty needs .*" + sentence):
        Trial(tmp_path, task=task, gradients={"penalty": 1.0, "penalty_of": "loss"}).attempt()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"compile": True}, "compile"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"optim": {"name": "sophia"}}, "optim.name=sophia"),
        ({"parallel": {"data": 2, "shard": "zero3"}}, "parallel.shard"),
    ],
)
def test_what_cannot_be_differentiated_twice_is_refused(given, named):
    with pytest.raises(ValidationError, match=f"which do not go with {named}.*leave one of them out"):
        TrainConfig.model_validate(given | {"gradients": {"penalty": 1.0}})
    with pytest.raises(ValidationError, match=r"penalty_of='loss' is read only with gradients\.penalty:"):
        TrainConfig.model_validate({"gradients": {"penalty_of": "loss"}})
