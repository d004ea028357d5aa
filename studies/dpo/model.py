"""The models of the study: a policy with its reference, which is itself without adapters, and a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from studies._lm.adapter import adapted, kept_alone, lora
from studies._lm.config import ModelConfig
from studies._lm.text import IGNORED
from trainer.data import pad
from trainer.losses import sequence_log_probs


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
        places = torch.arange(tokens.shape[1], device=tokens.device)
        last = torch.where(labels != IGNORED, places, 0).amax(dim=1)
        state = out.hidden_states[-1][torch.arange(len(tokens), device=tokens.device), last]
        return self.head(state.float()).squeeze(1)


def reward_model(config: ModelConfig) -> nn.Module:
    return kept_alone(RewardModel(config), config)


def log_probs(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each answer [batch], its tokens [batch]) of sequences [batch, time]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return sequence_log_probs(logits, labels[:, 1:], ignore_index=IGNORED)


def reference_log_probs(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The same of the model as it was: its adapters off."""
    with torch.no_grad(), unwrapped(model).disable_adapter():
        return log_probs(unwrapped(model), tokens, labels)[0]


def in_parts(function: Callable[..., Tensor], rows: int, *tensors: Tensor) -> Tensor:
    """function(*tensors), all [batch, ...], computed for at most `rows` of the batch at a time."""
    return torch.cat([function(*part) for part in zip(*(x.split(rows) for x in tensors), strict=True)])


def unwrapped(model: Any) -> Any:
    """The model within what replicas it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def answers(model: Any, prompts: Sequence[Sequence[int]], most: int, end: int, rows: int = 64) -> tuple[Tensor, Tensor]:
    """One answer to each prompt, drawn from the model token by token until `end`, `most` at most: (tokens [prompts,
    time], padded by `end`; labels [prompts, time], IGNORED outside the answers). `rows` prompts are read at a time."""
    device, answered = next(model.parameters()).device, [list(prompt) for prompt in prompts]
    going = list(range(len(answered)))
    for _ in range(most):
        tokens, mask = pad([torch.tensor(answered[i]) for i in going], end)
        last = in_parts(partial(_last_logits, model), rows, tokens.to(device), mask.sum(dim=1).to(device) - 1)
        for i, token in zip(going, last.softmax(dim=-1).multinomial(1).flatten().tolist(), strict=True):
            answered[i].append(token)
        going = [i for i in going if answered[i][-1] != end]
        if not going:
            break
    tokens, mask = pad([torch.tensor(one) for one in answered], end)
    begin = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    held = mask & (torch.arange(tokens.shape[1]) >= begin)
    return tokens.to(device), torch.where(held, tokens, IGNORED).to(device)


def _last_logits(model: Any, tokens: Tensor, last: Tensor) -> Tensor:
    """[batch, classes], of the place `last` [batch] of each sequence."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return logits[torch.arange(len(tokens), device=tokens.device), last].float()
