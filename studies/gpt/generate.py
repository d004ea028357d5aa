"""Generates text from a model, token by token; torch only.

The prompt is read at once and then each token once, with the keys and values of earlier ones kept, until the model's
window is full. From then on the window moves by a token at a time and is read anew for each: the layers' kept values
were computed with tokens that have left it, and would differ from a fresh pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from studies.gpt.model import forget, remember


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
    """Returns the `count` tokens after `prompt`, which must not be empty; fewer if the document ends earlier.

    Each is drawn from softmax(logits / temperature), or the likeliest at temperature 0; the model sees the last
    `length` tokens, of a longer prompt too.
    """
    device = next(model.parameters()).device
    tokens, read = list(prompt), 0
    remember(model)
    try:
        for _ in range(count):
            if len(tokens) > length:
                remember(model)
                read = len(tokens) - length
            row, read = torch.tensor([tokens[read:]], device=device), len(tokens)
            token = _drawn(model(row)[0, -1].float().cpu(), temperature, generator)
            if token == end:
                break
            tokens.append(token)
    finally:
        forget(model)
    return tokens[len(prompt) :]


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
