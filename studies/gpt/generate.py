"""Text from a model, token by token; torch only.

The whole row is computed again for each token: no cache of keys and values, so that it is the model as it was trained,
whatever ranks hold of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    length: int,
    end: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The `count` tokens that follow `prompt`, which has one at least; fewer where the document ends before.

    Each is drawn from softmax(logits / temperature), or the likeliest at temperature 0; the model sees the last
    `length` tokens.
    """
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(count):
        row = torch.tensor([tokens[-length:]], device=device)
        token = _drawn(model(row)[0, -1].float().cpu(), temperature, generator)
        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
