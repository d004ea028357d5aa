"""The preference losses against TRL's own code, on random log-probabilities of answers of different lengths."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounds import rounds
from torch import Tensor

from trainer.losses import dpo, ipo, kto

PAIRS, TIME = 8, 12


@pytest.fixture(scope="module")
def trainers() -> Any:
    """TRL's trainers, whose import takes seconds that only these tests are to spend."""
    with warnings.catch_warnings():  # of what the library imports
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="runs where make test has installed trl")
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.kto_trainer import KTOTrainer
    return SimpleNamespace(dpo=DPOTrainer, kto=KTOTrainer)


def random(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities of tokens [2 PAIRS, TIME - 1], those of a reference, mask of answers [2 PAIRS, TIME])."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (torch.randn(2 * PAIRS, TIME - 1, generator=generator).abs().neg() for _ in range(2))
    lengths = torch.randint(1, TIME - 2, (2 * PAIRS, 1), generator=generator)
    mask = (torch.arange(TIME) >= 2) & (torch.arange(TIME) < 2 + lengths)
    return policy * mask[:, 1:], reference * mask[:, 1:], mask.long()


class Trainer(SimpleNamespace):
    """What TRL's `_compute_loss` asks of its trainer, whose metrics go nowhere."""

    def __init__(self, **own: Any) -> None:
        accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
        common = {
            "model": SimpleNamespace(training=False),
            "accelerator": accelerator,
            "_metrics": defaultdict(lambda: defaultdict(list)),
        }
        super().__init__(**common, aux_loss_enabled=False, precompute_ref_logps=True, **own)


def outputs(log_probs: Tensor) -> Any:
    """A model's outputs with these."""
    zeros = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def of_trl(
    trainers: Any, kind: str, beta: float, policy: Tensor, reference: Tensor, mask: Tensor, smoothing: float = 0.0
) -> Tensor:
    chosen, rejected = reference.sum(dim=1).chunk(2)
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    own = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "loss_types": [kind], "loss_weights": [1.0]}
    trainer = Trainer(beta=beta, use_weighting=False, _total_train_tokens=0, label_smoothing=smoothing, **own)
    return trainers.dpo._compute_loss(trainer, lambda **_: outputs(policy), inputs, False)


def pairs(log_probs: Tensor, per: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    return (log_probs.sum(dim=1) / per).chunk(2)


@rounds("seed", range(5))
@rounds("beta", [0.05, 0.5])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_and_ipo_are_trls(trainers, kind, beta, seed):
    policy, reference, mask = random(seed)
    given = policy.clone().requires_grad_()
    want = of_trl(trainers, kind, beta, given, reference, mask)
    (want_gradient,) = torch.autograd.grad(want, given)
    policy.requires_grad_()
    per = mask.sum(dim=1) if kind == "ipo" else 1.0
    loss = (ipo if kind == "ipo" else dpo)(*pairs(policy, per), *pairs(reference, per), beta=beta)
    (gradient,) = torch.autograd.grad(loss.sum / loss.count, policy)
    torch.testing.assert_close(loss.sum / loss.count, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-6)


@rounds("seed", range(5))
@rounds("beta", [0.05, 0.5])
def test_smoothed_dpo_is_trls(trainers, beta, seed):
    """TRL smooths "aot" this way, which sorts the margins of a batch: of a batch of one pair it is DPO's loss."""
    policy, reference, mask = random(seed)
    given = policy.clone().requires_grad_()
    rows = [[i, i + PAIRS] for i in range(PAIRS)]
    each = [of_trl(trainers, "aot", beta, given[i], reference[i], mask[i], smoothing=0.2) for i in rows]
    want = torch.stack(each).mean()
    (want_gradient,) = torch.autograd.grad(want, given)
    policy.requires_grad_()
    loss = dpo(*pairs(policy), *pairs(reference), beta=beta, label_smoothing=0.2)
    (gradient,) = torch.autograd.grad(loss.sum / loss.count, policy)
    torch.testing.assert_close(loss.sum / loss.count, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-6)


@rounds("seed", range(5))
@rounds("beta", [0.05, 0.5])
def test_kto_is_trls(trainers, beta, seed):
    policy, reference, mask = random(seed)
    other, ref_other, _ = random(seed + 100)
    label = torch.rand(2 * PAIRS, generator=torch.Generator().manual_seed(seed)) < 0.5
    batch = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "label": label,
        "ref_logps": reference.sum(dim=1),
        "ref_KL_logps": ref_other.sum(dim=1),
    }
    own = {"calculate_KL": True, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}
    trainer = Trainer(beta=beta, _compute_kl_logps=lambda *_: other.sum(dim=1), _total_train_tokens=0, **own)
    given = policy.clone().requires_grad_()
    want = trainers.kto._compute_loss(trainer, lambda **_: outputs(given), batch, False)
    (want_gradient,) = torch.autograd.grad(want, given)
    policy.requires_grad_()
    other.requires_grad_()
    loss = kto(policy.sum(1), reference.sum(1), label, (other - ref_other).sum(1), beta=beta)
    torch.testing.assert_close(loss.sum / loss.count, want, rtol=1e-6, atol=1e-6)
    gradient, to_reference_point = torch.autograd.grad(loss.sum / loss.count, [policy, other], allow_unused=True)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-6)
    assert to_reference_point is None
