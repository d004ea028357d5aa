"""Holds the model of the study: a policy, its value function, the frozen reward models and the rollout kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies._lm import config as lm
from studies._lm.adapter import kept_alone, lora
from studies._lm.policy import answers
from studies._lm.text import IGNORED
from studies.online.config import PROMPT, Config
from studies.online.rewards import combined, ensemble
from studies.online.rollout import Kept
from trainer.data.text import Bytes


class OnlineModel(nn.Module):
    """A policy by LoRA, whose reference is itself without adapters.

    tokens [batch, prompt and time] -> (log-probabilities of the answers' tokens, values of the states before these),
    [batch, time] each. The value function, a linear layer on the policy's states, is 0 at first; without one all values
    are 0.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        settings = lm.ModelConfig(rank=config.model.rank, alpha=config.model.alpha, dropout=0.0, base_dropout=0.0)
        self.policy: Any = lora(settings)
        self.critic = _zeros(self.policy.config.hidden_size) if config.method == "ppo" else None
        self.reward = ensemble(config)
        self.kept = Kept(config.train.batch_size, PROMPT, config.rollout.max_new_tokens, config.loss.beta)

    def forward(self, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        llama = self.policy.get_base_model()  # with its adapters
        states = llama.model(input_ids=tokens, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
        scores = (llama.lm_head(states).float() / temperature).log_softmax(dim=-1)
        log_probs = scores.gather(2, tokens[:, PROMPT:, None]).squeeze(2)
        if self.critic is None:
            return log_probs, torch.zeros_like(log_probs)
        return log_probs, self.critic(states).squeeze(2).float()

    def reference(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Returns the log-probabilities of the model without its adapters, [batch, time]."""
        with self.policy.disable_adapter():
            return self(tokens, temperature)[0]

    def rewards(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Returns the reward of each answer by each reward model, [members, batch]."""
        with torch.autocast(tokens.device.type, enabled=False):
            return torch.stack([member(tokens, PROMPT + mask.sum(dim=1)) for member in self.reward])


def _zeros(width: int) -> nn.Linear:
    layer = nn.Linear(width, 1)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def online_model(config: Config) -> nn.Module:
    """Returns the model; checkpoints hold adapters, value function, reward models and rollout."""
    return kept_alone(OnlineModel(config), lm.ModelConfig(), also=("reward", "kept"))


def answered(policy: Any, prompts: Tensor, most: int, rows: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns (tokens [batch, prompt + most], mask [batch, most] of the answers' tokens) of answers to `prompts`."""
    tokens, labels = answers(policy, prompts.tolist(), most, Bytes.end, rows, temperature)
    missing = prompts.shape[1] + most - tokens.shape[1]
    mask = F.pad(labels != IGNORED, (0, missing), value=False)
    return F.pad(tokens, (0, missing), value=Bytes.end), mask[:, prompts.shape[1] :]


def learnt_reward(model: OnlineModel, config: Config, tokens: Tensor, mask: Tensor) -> Tensor:
    """Returns the reward of each answer by the ensemble, [batch]."""
    return combined(model.rewards(tokens, mask), config.reward.combine, config.reward.caution)
