"""Trains a policy on answers that it gives meanwhile, and evaluates how far learnt and true reward are apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from studies._lm.base import shapes_only
from studies._lm.config import rows_at_once
from studies._lm.pairs import true_reward
from studies.online import losses
from studies.online.config import PROMPT, Config
from studies.online.model import OnlineModel, answered, learnt_reward, online_model
from studies.online.rewards import records
from studies.online.rollout import Prompts, Rollout
from trainer.data.text import Bytes
from trainer.errors import ConfigError
from trainer.losses import dpo, weighted_sum
from trainer.model.eval_mode import as_evaluated
from trainer.task import Loss, Task

Batch = dict[str, Tensor]


class Judged(NamedTuple):
    """Answers to held-back prompts: their true and learnt rewards, and tokens, [prompts] each."""

    texts: list[str]
    truth: Tensor
    reward: Tensor
    lengths: Tensor


class OnlineTask(Task):
    """A policy that learns from the rewards of its own answers, by PPO, GRPO or online DPO.

    A step whose number is a multiple of `rollout.steps` draws answers to its batch of prompts and judges them; the
    steps after it, which get the same prompts, train on the same answers. The draws are a function of seed and step,
    and the answers are buffers of the model, so a resumed trial goes on with the same ones.
    """

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._shown: list[dict[str, Any]] = []  # answers of the last evaluation
        self._of_reference: Judged | None = None

    def model(self) -> nn.Module:
        return online_model(self.config)

    def train_set(self) -> Prompts:
        rollout = self.config.rollout
        return Prompts(_tokens(self._prompts[0]), rollout.answers, self.config.group, rollout.steps)

    def largest_batch(self, size: int) -> Batch:
        return {"prompt": torch.zeros(size, PROMPT, dtype=torch.long)}

    @cached_property
    def _prompts(self) -> tuple[list[str], list[str]]:
        _, trained, held_back = records(self.config)
        return trained, held_back

    # --- Training

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        net: Any = model
        rollout = self._rollout(net, batch["prompt"])
        log_probs, values = net(rollout.tokens, self.config.rollout.temperature)
        if self.config.method == "ppo":
            loss = self._ppo(rollout, log_probs, values, net.kept.beta)
        else:
            loss = (self._grpo if self.config.method == "grpo" else self._online_dpo)(rollout, log_probs)
        means = {"reward": rollout.rewards.mean(), "kl": rollout.divergence, "beta": net.kept.beta}
        means["length"] = rollout.mask.sum(dim=1).float().mean()
        return replace(loss, terms={**loss.terms, **{name: mean * loss.count for name, mean in means.items()}})

    def _ppo(self, rollout: Rollout, log_probs: Tensor, values: Tensor, beta: Tensor) -> Loss:
        loss, mask = self.config.loss, rollout.mask
        rewards = losses.token_rewards(rollout.rewards, rollout.old, rollout.reference, mask, beta=beta)
        advantages = losses.gae(rewards, rollout.values, mask, discount=loss.discount, trace=loss.trace)
        policy = losses.ppo(log_probs, rollout.old, losses.whitened(advantages, mask), mask, clip=loss.clip)
        returns = advantages + rollout.values
        critic = losses.value_loss(values, rollout.values, returns, mask, clip=loss.value_clip)
        return weighted_sum({"policy": policy, "value": critic}, {"policy": 1.0, "value": loss.value_weight})

    def _grpo(self, rollout: Rollout, log_probs: Tensor) -> Loss:
        loss = self.config.loss
        advantages = losses.group_advantages(rollout.rewards, self.config.group)
        tokens = (log_probs, rollout.old, rollout.reference)
        return losses.grpo(*tokens, advantages, rollout.mask, clip=loss.clip, beta=loss.beta)

    def _online_dpo(self, rollout: Rollout, log_probs: Tensor) -> Loss:
        policy, reference = (
            torch.where(rollout.mask, tokens, 0.0).sum(dim=1) for tokens in (log_probs, rollout.reference)
        )
        chosen, rejected = losses.preferred(rollout.rewards)
        pairs = (policy[chosen], policy[rejected], reference[chosen], reference[rejected])
        return dpo(*pairs, beta=self.config.loss.beta)

    def _rollout(self, model: Any, prompts: Tensor) -> Rollout:
        """Returns the answers to train on at this step: the kept ones, or else new ones, which are kept."""
        config, number = self.config, self.step // self.config.rollout.steps
        if shapes_only():
            empty = Rollout.empty(len(prompts), PROMPT, config.rollout.max_new_tokens)
            return Rollout(*(tensor.to(prompts.device) for tensor in empty))
        if len(prompts) != config.train.batch_size:
            raise ConfigError(
                f"a step got {len(prompts)} of its {config.train.batch_size} answers, which are drawn and judged at "
                "once: lower train.batch_size instead of its micro-batch."
            )
        if not model.kept.holds(number, prompts):
            with as_evaluated(model):
                model.kept.keep(number, self._drawn(model, prompts), self._beta(model))
        return model.kept.rollout()

    def _drawn(self, model: OnlineModel, prompts: Tensor) -> Rollout:
        settings = self.config.rollout
        tokens, mask = answered(model.policy, prompts, settings.max_new_tokens, len(prompts), settings.temperature)
        old, values = model(tokens, settings.temperature)
        reference = model.reference(tokens, settings.temperature)
        return Rollout(tokens, mask, old, reference, values, learnt_reward(model, self.config, tokens, mask))

    def _beta(self, model: Any) -> Tensor:
        """Returns the coefficient of the next rollout: adapted to the divergence of the last one, if that is set."""
        target = self.config.loss.target_kl
        if target is None or self.config.method != "ppo" or int(model.kept.number) < 0:
            return model.kept.beta.clone()
        return losses.adapted(model.kept.beta, model.kept.rollout().divergence, target=target)

    # --- Evaluation

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the metrics of the policy's answers to held-back prompts.

        `val/true_reward` is known since the preferences are generated; `val/reward` is the ensemble's. `val/gap` is by
        how much more than the true reward the learnt one has risen above that of the reference's answers: reward
        hacking. `val/kl` is the divergence from the reference in nats, `val/length` counts tokens, the end included.
        """
        net: Any = model
        prompts = _tokens(self._prompts[1]).to(next(net.parameters()).device)
        tokens, mask = self._answers(net.policy, prompts)
        judged, before = self._judged(net, tokens, mask), self._baseline(net, prompts)
        ratio = torch.where(mask, net(tokens)[0] - net.reference(tokens), 0.0).sum(dim=1)
        self._show(judged)
        return {
            "val/true_reward": float(judged.truth.mean()),
            "val/reward": float(judged.reward.mean()),
            "val/gap": float((judged.reward - judged.truth).mean() - (before.reward - before.truth).mean()),
            "val/kl": float(ratio.mean()),
            "val/length": float(judged.lengths.mean()),
        }

    def _answers(self, policy: Any, prompts: Tensor) -> tuple[Tensor, Tensor]:
        return answered(policy, prompts, self.config.rollout.max_new_tokens, rows_at_once(self.config.train))

    def _judged(self, model: OnlineModel, tokens: Tensor, mask: Tensor) -> Judged:
        texts = [Bytes().decode(row[kept].tolist()) for row, kept in zip(tokens[:, PROMPT:], mask, strict=True)]
        truth = torch.tensor([true_reward(text) for text in texts], device=tokens.device)
        return Judged(texts, truth, learnt_reward(model, self.config, tokens, mask), mask.sum(dim=1).float())

    def _baseline(self, model: Any, prompts: Tensor) -> Judged:
        """Returns the reference's answers, drawn once, by the data's seed."""
        if self._of_reference is None:
            with torch.random.fork_rng(devices=[]), model.policy.disable_adapter():
                torch.manual_seed(self.config.data.seed)
                self._of_reference = self._judged(model, *self._answers(model.policy, prompts))
        return self._of_reference

    def _show(self, judged: Judged) -> None:
        rows = zip(self._prompts[1], judged.texts, judged.reward.tolist(), judged.truth.tolist(), strict=True)
        names = ("prompt", "response", "reward", "true_reward")
        self._shown = [dict(zip(names, row, strict=True)) for row in rows]

    def artifacts(self, model: nn.Module) -> dict[str, str]:
        """Returns the answers of the evaluation with both rewards, as `answers/epoch-N.jsonl`."""
        epoch = round(self.progress * self.config.train.num_epochs)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._shown)
        return {f"answers/epoch-{epoch:04d}.jsonl": lines}


def _tokens(prompts: Sequence[str]) -> Tensor:
    return torch.tensor([Bytes().encode(prompt) for prompt in prompts])
