"""Computes log-probabilities of answers under a model with adapters and its reference, and draws answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from studies._lm.text import IGNORED
from trainer.data import pad
from trainer.losses import sequence_log_probs
from trainer.model.eval_mode import as_evaluated


def log_probs(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log-probability of each answer [batch], its tokens [batch]) of sequences [batch, time]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return sequence_log_probs(logits, labels[:, 1:], ignore_index=IGNORED)


def reference_log_probs(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probabilities by the original model: without adapters and dropout, also during training."""
    with as_evaluated(unwrapped(model)), unwrapped(model).disable_adapter():
        return log_probs(unwrapped(model), tokens, labels)[0]


def in_parts(function: Callable[..., Tensor], rows: int, *tensors: Tensor) -> Tensor:
    """Returns function(*tensors), all [batch, ...], computed for at most `rows` of the batch at a time."""
    return torch.cat([function(*part) for part in zip(*(x.split(rows) for x in tensors), strict=True)])


def unwrapped(model: Any) -> Any:
    """Returns the model inside a replica wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def answers(
    model: Any, prompts: Sequence[Sequence[int]], most: int, end: int, rows: int = 64, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns one answer to each prompt, drawn token by token until `end`, at most `most` tokens.

    Each token is drawn from softmax(logits / temperature). The result is (tokens [prompts, time], padded by `end`;
    labels [prompts, time], IGNORED outside the answers). `rows` prompts are read at a time, whose keys and values are
    kept meanwhile; the draws do not depend on their number.
    """
    device = next(model.parameters()).device
    chance = torch.rand(len(prompts), most)
    drawn: list[list[int]] = []
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        drawn += _drawn(model, prompts[part], chance[part].to(device), end, temperature)
    tokens, mask = pad([torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, drawn, strict=True)], end)
    begin = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    answered = mask & (torch.arange(tokens.shape[1]) >= begin)
    return tokens.to(device), torch.where(answered, tokens, IGNORED).to(device)


def _drawn(
    model: Any, prompts: Sequence[Sequence[int]], chance: Tensor, end: int, temperature: float
) -> list[list[int]]:
    """Returns the answers to prompts that are read together.

    chance [prompts, most], uniform in [0, 1), decides each token: the first at which the cumulative distribution is
    above it.
    """
    read, mask = (x.to(chance.device) for x in pad([torch.tensor(prompt) for prompt in prompts], end, side="left"))
    drawn, kept = read[:, :0], None
    for uniform in chance.T[..., None]:
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -read.shape[1] :]
        out = model(input_ids=read, attention_mask=mask, position_ids=positions, past_key_values=kept, use_cache=True)
        kept, scores = out.past_key_values, out.logits[:, -1].float() / temperature
        total = scores.softmax(dim=-1).cumsum(dim=-1)
        read = (total <= uniform * total[:, -1:]).sum(dim=1, keepdim=True).clamp(max=total.shape[1] - 1)
        drawn, mask = torch.cat([drawn, read], dim=1), torch.cat([mask, torch.ones_like(read, dtype=torch.bool)], dim=1)
        if (drawn == end).any(dim=1).all():
            break
    return [row[: row.index(end) + 1] if end in row else row for row in drawn.tolist()]
