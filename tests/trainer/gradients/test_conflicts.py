"""PCGrad against its paper's algorithm 1 in float64, on parts of a loss, micro-batches and whole runs."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rounds import rounds
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.gradients.conflicts import projected
from trainer.gradients.parts import by_parts
from trainer.losses import weighted_sum
from trainer.task import Loss

F64 = torch.float64


def algorithm_1(gradients: np.ndarray, orders: list[tuple[int, ...]]) -> np.ndarray:
    """Yu et al. 2020: [terms, parameters], and for each term the order in which it meets the others."""
    moved = gradients.copy()
    for i, order in enumerate(orders):
        for j in order:
            if i != j and moved[i] @ gradients[j] < 0:
                moved[i] -= moved[i] @ gradients[j] / (gradients[j] @ gradients[j]) * gradients[j]
    return moved.sum(axis=0)


@rounds("seed", [0, 1, 2])
def test_it_is_the_papers_algorithm(seed):
    gradients = np.random.default_rng(seed).normal(size=(3, 7))
    orders = list(itertools.permutations(range(3)))[seed : seed + 3]
    drawn = iter(orders)
    terms = [[torch.from_numpy(g[:3]), torch.from_numpy(g[3:]).view(2, 2)] for g in gradients]
    (first, second), share = projected(terms, lambda count: next(drawn))
    assert first is not None and second is not None
    np.testing.assert_allclose(np.concatenate([first, second.flatten()]), algorithm_1(gradients, orders), rtol=1e-12)
    assert not np.allclose(algorithm_1(gradients, orders), gradients.sum(axis=0))
    assert 0 < share <= 1


def test_of_two_terms_neither_step_raises_the_other():
    a, b = torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([-1.0, 1.0], dtype=F64)
    [total], share = projected([[a], [b]], lambda count: range(count))
    assert total is not None
    assert total.tolist() == pytest.approx([0.5, 1.5])
    assert (float(share), float(total @ a) >= 0, float(total @ b) >= 0) == (1.0, True, True)
    [alike], share = projected([[a], [-b]], lambda count: range(count))
    assert (alike.tolist(), float(share)) == ([2.0, -1.0], 0.0)


def test_a_parameter_of_one_part_has_that_parts_gradient():
    a, b = [torch.tensor([1.0]), torch.tensor([2.0]), None], [torch.tensor([3.0]), None, None]
    totals, _ = projected([a, b], lambda count: range(count))
    assert [None if total is None else total.tolist() for total in totals] == [[4.0], [2.0], None]
    assert projected([], lambda count: range(count))[0] == []
    zeros, _ = projected([[torch.zeros(1)], [torch.ones(1)]], lambda count: range(count))
    assert zeros[0].tolist() == [1.0]


@rounds("cuts", [(0, 12), (0, 5, 12), (0, 1, 2, 12)])
def test_micro_batches_of_any_size_give_the_gradient_of_the_whole_window(cuts):
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, y = torch.randn(12, 4, dtype=F64), torch.randint(3, (12,))

    def loss_of(i: int, rows: slice) -> Loss:
        out = net(x[rows])
        parts = {"a": Loss(cross_entropy(out, y[rows], reduction="sum"), len(y[rows])), "b": Loss(-out.sum(), len(out))}
        return weighted_sum(parts, {"a": 1.0, "b": 0.5})

    params = list(net.parameters())
    window = by_parts(
        [slice(*cut) for cut in itertools.pairwise(cuts)], loss_of, params, order=lambda count: range(count)
    )
    parts = loss_of(0, slice(0, 12)).parts
    gradients = np.stack(
        [
            np.concatenate([g.flatten() for g in torch.autograd.grad(part, params, retain_graph=True)])
            for part in parts.values()
        ]
    )
    expected = algorithm_1(gradients, [(0, 1), (0, 1)])
    np.testing.assert_allclose(torch.cat([p.grad.flatten() for p in params]), expected, rtol=1e-10, atol=1e-12)
    assert (float(window.count), window.terms.keys()) == (12, {"loss_a", "loss_b", "gradient_conflicts"})


class TwoTerms(Toy):
    """A second term that draws the other way."""

    weights: ClassVar = {"fit": 1.0, "other": 0.5}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x)
        labels = {"fit": y, "other": (y + 1) % 3}
        parts = {name: Loss(cross_entropy(out, to, reduction="sum"), len(y)) for name, to in labels.items()}
        return weighted_sum(parts, self.weights)


class OneTerm(TwoTerms):
    weights: ClassVar = {"fit": 1.0}


PCGRAD = {"gradients": {"conflicts": "pcgrad"}}


def test_a_run_steps_by_it_and_goes_on_to_the_bit(tmp_path):
    oracle = uninterrupted(tmp_path / "whole", task=TwoTerms, **PCGRAD)
    plain = uninterrupted(tmp_path / "plain", task=TwoTerms)
    assert oracle.digest() != plain.digest()
    shares = [value for (_, name), value in oracle.reporter.values.items() if name == "train/gradient_conflicts"]
    assert all(0 < share <= 1 for share in shares) and len(shares) == 2
    trial = Trial(tmp_path / "cut", TwoTerms, **PCGRAD)
    assert trial.attempt(killed_at(4)) is None
    assert trial.attempt() is not None
    assert trial.digest() == oracle.digest()


def test_a_loss_of_one_part_trains_as_without_it(tmp_path):
    one, plain = (uninterrupted(tmp_path / name, task=OneTerm, **more) for name, more in (("a", PCGRAD), ("b", {})))
    values = {key: value for key, value in one.reporter.values.items() if key[1] != "train/gradient_conflicts"}
    same = ("train/loss", "train/grad_norm", "val/loss")
    assert {k: v for k, v in values.items() if k[1] in same} == {
        k: v for k, v in plain.reporter.values.items() if k[1] in same
    }


def test_a_loss_without_parts_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(
        ConfigError, match=r"train.gradients.conflicts and .* compare the gradients of a loss.s parts.*weighted_sum"
    ):
        Trial(tmp_path, Toy, **PCGRAD).attempt()


@rounds(
    ("more", "message"),
    [
        ({"compile": True}, "compile"),
        ({"parallel": {"data": 2}}, "parallel, where"),
        ({"activations": {"checkpoint": "full"}}, "activations.checkpoint=full"),
        ({"micro_batch_size": "auto"}, "micro_batch_size=auto"),
        ({"memory_limit": 1000}, "memory_limit"),
        ({"gradients": {"conflicts": "pcgrad", "penalty": 1.0}}, "gradients.penalty"),
        ({"lanes": 2}, "gradients.conflicts=pcgrad; leave gradients.conflicts out"),
    ],
)
def test_what_takes_whole_gradients_is_refused_beside_it(more, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(PCGRAD | more)
