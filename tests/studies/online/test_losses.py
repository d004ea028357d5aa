"""The losses of the online study, against loops over their formulas, an episode by hand, and TRL's trainers."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from studies.online import losses
from trainer.losses import dpo

BATCH, TIME = 8, 7
SEEDS = pytest.mark.parametrize("seed", range(3))


def drawn(seed: int, count: int) -> tuple[Tensor, ...]:
    """Random tensors [BATCH, TIME] in float64, then the mask of answers of 1 to TIME tokens."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(BATCH, TIME, generator=generator, dtype=torch.float64) for _ in range(count)]
    lengths = torch.randint(1, TIME + 1, (BATCH, 1), generator=generator)
    return *numbers, torch.arange(TIME) < lengths


def tokens(mask: Tensor) -> list[tuple[int, int]]:
    return [(i, t) for i in range(BATCH) for t in range(TIME) if mask[i, t]]


def spoilt(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The tensors with NaN where no answer is: nothing may read it."""
    return [torch.where(mask, tensor, math.nan) for tensor in tensors]


@SEEDS
@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_advantages_are_the_sum_over_later_differences(discount, trace, seed):
    rewards, values, mask = drawn(seed, 2)
    computed = losses.gae(*spoilt(mask, rewards, values), mask, discount=discount, trace=trace)
    for i, t in tokens(mask):
        end, total = int(mask[i].sum()), 0.0
        for later in range(t, end):
            after = float(values[i, later + 1]) if later + 1 < end else 0.0
            delta = float(rewards[i, later]) + discount * after - float(values[i, later])
            total += (discount * trace) ** (later - t) * delta
        assert float(computed[i, t]) == pytest.approx(total, rel=1e-10)
    assert not computed[~mask].any()


def test_advantages_of_a_whole_trace_are_returns_less_values():
    rewards, values, mask = drawn(0, 2)
    computed = losses.gae(rewards, values, mask, discount=1.0, trace=1.0)
    returns = torch.where(mask, rewards, 0.0).flip(1).cumsum(dim=1).flip(1)
    torch.testing.assert_close(computed, torch.where(mask, returns - values, 0.0))


@SEEDS
def test_an_answers_score_is_paid_at_its_end_and_divergence_at_each_token(seed):
    log_probs, reference, mask = drawn(seed, 2)
    scores = torch.arange(1.0, BATCH + 1, dtype=torch.float64)
    computed = losses.token_rewards(scores, *spoilt(mask, log_probs, reference), mask, beta=0.3)
    for i, t in tokens(mask):
        paid = float(scores[i]) if t + 1 == int(mask[i].sum()) else 0.0
        assert float(computed[i, t]) == pytest.approx(paid - 0.3 * float(log_probs[i, t] - reference[i, t]))
    assert not computed[~mask].any()


@SEEDS
@pytest.mark.parametrize("clip", [0.1, 0.4])
def test_ppos_loss_is_the_smaller_of_both_gains(clip, seed):
    log_probs, old, advantages, mask = drawn(seed, 3)
    policy = log_probs.clone().requires_grad_()
    computed = losses.ppo(*spoilt(mask, policy, old, advantages), mask, clip=clip)
    total, outside, gradient = 0.0, 0, torch.zeros_like(old)
    for i, t in tokens(mask):
        ratio, gain = math.exp(float(log_probs[i, t] - old[i, t])), float(advantages[i, t])
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total -= min(ratio * gain, bounded * gain)
        outside += ratio != bounded
        gradient[i, t] = -ratio * gain if ratio * gain <= bounded * gain else 0.0
    assert computed.sum.item() == pytest.approx(total, rel=1e-10)
    assert (int(computed.count), int(computed.terms["clip_share"])) == (len(tokens(mask)), outside)
    torch.testing.assert_close(torch.autograd.grad(computed.sum, policy)[0], gradient)


@SEEDS
def test_the_value_loss_is_the_larger_of_both_errors(seed):
    values, old, returns, mask = drawn(seed, 3)
    computed = losses.value_loss(*spoilt(mask, values, old, returns), mask, clip=0.3)
    total = 0.0
    for i, t in tokens(mask):
        v, before, r = (float(x[i, t]) for x in (values, old, returns))
        near = min(max(v, before - 0.3), before + 0.3)
        total += 0.5 * max((v - r) ** 2, (near - r) ** 2)
    assert float(computed.sum) == pytest.approx(total, rel=1e-10)
    assert int(computed.count) == len(tokens(mask))


def test_advantages_are_whitened_over_the_tokens_of_answers():
    advantages, mask = drawn(0, 1)
    computed = losses.whitened(*spoilt(mask, advantages), mask)
    known = advantages[mask]
    torch.testing.assert_close(computed[mask], (known - known.mean()) / known.std(correction=0))
    assert not computed[~mask].any()


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (-3.0, 0.98)]
)
def test_the_coefficient_moves_by_at_most_two_per_cent(kl, factor):
    """Ziegler et al.: e = clip((KL - 6) / 6, -0.2, 0.2), beta (1 + 0.1 e)."""
    assert float(losses.adapted(torch.tensor(0.5), torch.tensor(kl), target=6.0)) == pytest.approx(0.5 * factor)


def by_loop(log_probs: Tensor, old: Tensor, reference: Tensor, rewards: Tensor, mask: Tensor, size: int) -> float:
    """GRPO's loss of a batch, clip 0.2 and beta 0.1, written from equations 3 and 4."""
    total = 0.0
    for first in range(0, BATCH, size):
        group = [float(reward) for reward in rewards[first : first + size]]
        mean = sum(group) / size
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (size - 1))
        for i in range(first, first + size):
            advantage, answer = (float(rewards[i]) - mean) / (deviation + 1e-4), 0.0
            for t in range(int(mask[i].sum())):
                ratio = math.exp(float(log_probs[i, t] - old[i, t]))
                gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
                apart = float(reference[i, t] - log_probs[i, t])
                answer += gain - 0.1 * (math.exp(apart) - apart - 1)
            total -= answer / int(mask[i].sum())
    return total


@SEEDS
@pytest.mark.parametrize("size", [2, 4])
def test_grpos_loss_is_that_of_the_paper(size, seed):
    log_probs, old, reference, rewards, mask = drawn(seed, 4)
    advantages = losses.group_advantages(rewards[:, 0], size)
    given = (*spoilt(mask, log_probs, old, reference), advantages, mask)
    computed = losses.grpo(*given, clip=0.2, beta=0.1)
    assert float(computed.sum) == pytest.approx(by_loop(log_probs, old, reference, rewards[:, 0], mask, size), rel=1e-9)
    assert computed.count == BATCH


def test_a_group_of_equal_rewards_has_no_advantage():
    assert not losses.group_advantages(torch.full((BATCH,), 3.0), 4).any()


def test_k3_estimates_the_divergence():
    """Of two distributions of three tokens: its mean under pi is KL(pi, ref), and no estimate is below 0."""
    pi, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    estimates = losses.k3(pi.log(), ref.log())
    assert float((pi * estimates).sum()) == pytest.approx(float((pi * (pi / ref).log()).sum()))
    assert (estimates >= 0).all()


def test_the_better_answer_of_each_two_is_chosen():
    chosen, rejected = losses.preferred(torch.tensor([1.0, 2.0, 5.0, 3.0, 4.0, 4.0]))
    assert chosen.tolist() == [1, 2, 4] and rejected.tolist() == [0, 3, 5]


def test_an_episode_of_ppo_by_hand():
    """An answer of two tokens is worth 1; beta is 0.5, discount 1, trace 0.5; ratio 1.5 at the first token, clip 0.2.

    The divergences 0.2 and -0.4 make the rewards -0.1 and 0.2 + 1 = 1.2. With the values 0.3 and 0.6 the differences
    are -0.1 + 0.6 - 0.3 = 0.2 and 1.2 - 0.6 = 0.6, and the advantages 0.2 + 0.5 * 0.6 = 0.5 and 0.6. So the policy's
    loss is -1.2 * 0.5 - 1 * 0.6 = -1.2. The returns are 0.8 and 1.2; new values of 0.7 and 0.6, the first clipped to
    0.3 + 0.2 = 0.5, have the errors 0.3^2 / 2 = 0.045 and 0.6^2 / 2 = 0.18.
    """
    mask = torch.tensor([[True, True, False]])
    old, reference = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.2, -1.6, 9.0]])
    values = torch.tensor([[0.3, 0.6, 9.0]])
    rewards = losses.token_rewards(torch.tensor([1.0]), old, reference, mask, beta=0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 1.2, 0.0]]))
    advantages = losses.gae(rewards, values, mask, discount=1.0, trace=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.6, 0.0]]))
    log_probs = old + torch.tensor([[math.log(1.5), 0.0, 0.0]])
    policy = losses.ppo(log_probs, old, advantages, mask, clip=0.2)
    assert (float(policy.sum), int(policy.count)) == (pytest.approx(-1.2), 2)
    critic = losses.value_loss(torch.tensor([[0.7, 0.6, 9.0]]), values, advantages + values, mask, clip=0.2)
    assert float(critic.sum) == pytest.approx(0.045 + 0.18)


# --- TRL


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL's trainers, whose import takes seconds that only these tests are to spend."""
    with warnings.catch_warnings():  # of what the library imports
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="runs where make test has installed trl")
        from trl.experimental.online_dpo import OnlineDPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
    return SimpleNamespace(grpo=GRPOTrainer, online_dpo=OnlineDPOTrainer)


@SEEDS
def test_grpos_loss_is_trls(trl, seed):
    """Its `_compute_loss`, for loss_type=grpo, with the gradient."""
    log_probs, old, reference, rewards, mask = (x.float() if x.is_floating_point() else x for x in drawn(seed, 4))
    advantages = losses.group_advantages(rewards[:, 0], 4)
    policy = log_probs.clone().requires_grad_()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        beta=0.1,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="grpo",
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    prompt, answers = torch.zeros(BATCH, 2, dtype=torch.long), torch.zeros(BATCH, TIME, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": answers, "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
    }  # fmt: skip
    expected = trl.grpo._compute_loss(trainer, None, inputs)
    (slope,) = torch.autograd.grad(expected, policy)
    log_probs.requires_grad_()
    computed = losses.grpo(log_probs, old, reference, advantages, mask, clip=0.2, beta=0.1)
    torch.testing.assert_close(computed.sum / computed.count, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(computed.sum / BATCH, log_probs)[0], slope, rtol=1e-4, atol=1e-6)


@SEEDS
def test_online_dpos_loss_is_trls(trl, seed):
    """Its `training_step`, whose two answers to a prompt are half a batch apart."""
    log_probs, reference, rewards, mask = (x.float() if x.is_floating_point() else x for x in drawn(seed, 3))
    apart = torch.cat([torch.arange(0, BATCH, 2), torch.arange(1, BATCH, 2)])
    policy, slopes = log_probs.clone().requires_grad_(), []
    read = SimpleNamespace(train=lambda: None)
    answers = torch.zeros(BATCH, TIME, dtype=torch.long)
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            use_vllm=False, missing_eos_penalty=None, loss_type="sigmoid", torch_empty_cache_steps=None, n_gpu=1,
            optim="adamw_torch", gradient_accumulation_steps=1,
        ),
        accelerator=SimpleNamespace(
            gather_for_metrics=lambda x: x, backward=lambda loss: slopes.extend(torch.autograd.grad(loss, policy))
        ),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        stats=defaultdict(list),
        _generate=lambda *_: (None, None, answers, mask[apart].long(), None),
        _forward=lambda model, *_: policy[apart] if model is read else reference[apart],
        _calculate_rewards_from_functions=lambda **_: rewards[apart, 0],
        beta=0.1, eos_token_ids=[1], ref_model=object(), reward_funcs=[len],
    )  # fmt: skip
    expected = trl.online_dpo.training_step(trainer, read, {"prompt": ["a"] * (BATCH // 2)})
    log_probs.requires_grad_()
    whole, before = (torch.where(mask, x, 0.0).sum(dim=1) for x in (log_probs, reference))
    chosen, rejected = losses.preferred(rewards[:, 0])
    computed = dpo(whole[chosen], whole[rejected], before[chosen], before[rejected], beta=0.1)
    mean = computed.sum / computed.count
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(mean, log_probs)[0], slopes[0], rtol=1e-4, atol=1e-6)
