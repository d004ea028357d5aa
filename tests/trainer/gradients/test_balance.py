"""GradNorm against its paper's algorithm 1 in float64, and in whole runs that are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rounds import rounds
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer.config import GradientConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.gradients.balance import Balance
from trainer.gradients.parts import by_parts
from trainer.losses import weighted_sum
from trainer.task import Loss

F64 = torch.float64


def algorithm_1(weights: np.ndarray, norms: np.ndarray, ratios: np.ndarray, alpha: float, lr: float) -> np.ndarray:
    """Chen et al. 2018: the next weights, by the numerical slope of eq. 2 with its target held fixed."""
    target = (weights * norms).mean() * (ratios / ratios.mean()) ** alpha

    def loss(w: np.ndarray) -> float:
        return np.abs(w * norms - target).sum()

    slope = [(loss(weights + h) - loss(weights - h)) / 2e-7 for h in 1e-7 * np.eye(len(weights))]
    moved = weights - lr * np.array(slope)
    return moved * len(weights) / moved.sum()


@rounds("alpha", [0.0, 0.12, 1.5])
def test_it_is_the_papers_algorithm(alpha):
    """Three parts of one model, of which the first falls 10 times as steeply; weights count before they change."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x = torch.randn(8, 4, dtype=F64)
    config = GradientConfig(balance="gradnorm", balance_alpha=alpha, balance_lr=0.003, balance_of=("weight",))
    balance, params = Balance(config, dict(net.named_parameters())), list(net.parameters())
    names, weights, first = ("a", "b", "c"), np.ones(3), None

    def loss_of(i: int, rows: slice) -> Loss:
        out = net(x[rows])
        squares = [10 * (out[:, 0] - 3).square(), (out[:, 1] + 2).square(), (out.sum(1) - 1).square()]
        return weighted_sum(
            {n: Loss(s.sum(), len(out)) for n, s in zip(names, squares, strict=True)}, dict.fromkeys(names, 1.0)
        )

    for _ in range(6):
        parts = loss_of(0, slice(0, 8)).parts
        gradients = [torch.autograd.grad(part, params, retain_graph=True) for part in parts.values()]
        means = np.array([part.item() / 8 for part in parts.values()])
        first = means if first is None else first
        window = by_parts([slice(0, 3), slice(3, 8)], loss_of, params, balance=balance)
        for k, p in enumerate(params):
            expected = sum(w * g[k] for w, g in zip(weights, gradients, strict=True))
            torch.testing.assert_close(p.grad, expected, rtol=1e-9, atol=1e-12)
        assert [float(window.terms[f"balance_{name}"]) / 8 for name in names] == pytest.approx(weights, rel=1e-6)
        balance.step()
        norms = np.array([g[0].norm().item() / 8 for g in gradients])
        weights = algorithm_1(weights, norms, means / first, alpha, 0.003)
        assert [balance.of(name) for name in names] == pytest.approx(weights, rel=1e-5)
        with torch.no_grad():
            for p in params:
                p -= 0.002 * p.grad
    assert abs(weights - 1).max() > 0.05


def test_only_a_finite_window_that_is_stepped_on_changes_weights():
    net = nn.Linear(1, 1)
    balance = Balance(GradientConfig(balance="gradnorm"), dict(net.named_parameters()))
    gradients = {"a": [torch.ones(1, 1), None], "b": [torch.full((1, 1), 5.0), torch.ones(1)]}
    for value, changed in ((torch.nan, False), (1.0, True)):
        balance.observe(gradients, {"a": torch.tensor(value), "b": torch.tensor(2.0)}, 1)
        assert balance.of("a") == balance.of("b") == 1.0
        balance.step()
        assert (balance.of("a") > 1.0 > balance.of("b")) is changed


def test_a_pattern_without_a_parameter_and_a_part_below_zero_are_refused():
    named = dict(nn.Linear(1, 1).named_parameters())
    with pytest.raises(
        ConfigError, match=r"balance_of=\['head.*'\] matches no trained parameter.*such as weight, bias"
    ):
        Balance(GradientConfig(balance="gradnorm", balance_of=("head.*",)), named)
    balance = Balance(GradientConfig(balance="gradnorm"), named)
    with pytest.raises(ConfigError, match=r"'a' began at -1: leave it out"):
        balance.observe({"a": [torch.ones(1, 1), None]}, {"a": torch.tensor(-2.0)}, 2)


class TwoTerms(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x)
        parts = {"fit": Loss(cross_entropy(out, y, reduction="sum"), len(y)), "small": Loss(out.square().sum(), len(y))}
        return weighted_sum(parts, {"fit": 1.0, "small": 0.5})


BOTH = {"gradients": {"balance": "gradnorm", "balance_lr": 0.2, "conflicts": "pcgrad"}}
ALONE = {"gradients": {"balance": "gradnorm", "balance_lr": 0.2}}


@pytest.mark.parametrize("config", [ALONE, BOTH], ids=["alone", "with pcgrad"])
def test_a_run_goes_on_to_the_bit(config, tmp_path, monkeypatch):
    oracle = uninterrupted(tmp_path / "whole", task=TwoTerms, **config)
    weights = [value for (_, name), value in oracle.reporter.values.items() if name.startswith("train/balance_")]
    assert len(weights) == 4 and sum(weights) == pytest.approx(4) and weights[-1] != weights[-2]
    assert oracle.digest() != uninterrupted(tmp_path / "plain", task=TwoTerms).digest()
    for name, same in (("cut", True), ("forgotten", False)):
        trial = Trial(tmp_path / name, TwoTerms, **config)
        assert trial.attempt(killed_at(6)) is None
        if not same:
            monkeypatch.setenv("HPO_TESTING", "1")
            monkeypatch.setenv("HPO_OMIT_STATE", "balance")
        assert trial.attempt() is not None
        assert (trial.digest() == oracle.digest()) is same


def test_it_refuses_what_does_not_know_parts():
    with pytest.raises(ValueError, match=r"gradients.balance=gradnorm takes the gradient of each part.*compile"):
        TrainConfig.model_validate(ALONE | {"compile": True})
