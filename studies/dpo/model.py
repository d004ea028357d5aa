"""Holds the models of the study: a policy, whose reference is itself without adapters, and a reward model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from studies._lm.adapter import adapted, kept_alone, lora
from studies._lm.config import ModelConfig
from studies._lm.text import IGNORED


def policy_model(config: ModelConfig) -> nn.Module:
    return adapted(config)


class RewardModel(nn.Module):
    """A scalar head on the state at an answer's end: tokens, labels [batch, time] -> rewards [batch]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.lm: Any = lora(config)
        self.head = nn.Linear(self.lm.config.hidden_size, 1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        out = self.lm(input_ids=tokens, use_cache=False, output_hidden_states=True)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = torch.where(labels != IGNORED, positions, 0).amax(dim=1)
        state = out.hidden_states[-1][torch.arange(len(tokens), device=tokens.device), last]
        return self.head(state.float()).squeeze(1)


def reward_model(config: ModelConfig) -> nn.Module:
    return kept_alone(RewardModel(config), config)
