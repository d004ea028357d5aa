"""Tokens and operations: how large a model, and how long to train it. Torch-free.

Hoffmann et al. 2022 (arXiv 2203.15556): training N parameters (all of them, embeddings too) on D tokens takes about
C = 6 N D operations, and for a given C the lowest loss is reached where N and D grow alike, each as about C^0.5 (their
approaches 1 and 2, table 2). At the sizes they trained (table 3) that is about 20 tokens for each parameter, hence
N = sqrt(C / 120). The constants of their approach 3, the fitted loss, were found not to follow from its data (Besiroglu
et al. 2024, arXiv 2404.10102), so it is not used here. Small models of bytes are far from where this was measured.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from studies.gpt.config import Config, ModelConfig

TOKENS_PER_PARAMETER = 20
FLOPS_PER_PARAMETER_AND_TOKEN = 6  # two for the product forward, four for both gradients; attention's own left out


def parameters(model: ModelConfig, vocab_size: int) -> int:
    """How many the model has."""
    h, kv = model.hidden_size, model.hidden_size // model.num_heads * model.num_kv_heads
    block = 2 * h * h + 2 * h * kv + 3 * h * model.mlp + 2 * h
    return model.num_layers * block + h + (1 if model.tie else 2) * vocab_size * h


def flops(parameters: int, tokens: float) -> float:
    """C = 6 N D."""
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens)


def optimal(budget: float) -> tuple[float, float]:
    """(parameters, tokens) that make the best of `budget` operations."""
    size = math.sqrt(budget / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER))
    return size, TOKENS_PER_PARAMETER * size


def rows(config: Config) -> int | None:
    """Of an epoch, so that the run sees data.tokens_per_parameter; None where that is not set."""
    if config.data.tokens_per_parameter is None:
        return None
    tokens = config.data.tokens_per_parameter * parameters(config.model, config.data.vocab_size)
    return max(round(tokens / config.data.block_size / config.train.num_epochs), 1)


def report(config: Config) -> dict[str, Any]:
    """The model's size and what it takes to train it on 20 tokens for each parameter."""
    size = parameters(config.model, config.data.vocab_size)
    tokens = TOKENS_PER_PARAMETER * size
    return {"parameters": size, "compute_optimal_tokens": tokens, "compute_optimal_flops": flops(size, tokens)}


if __name__ == "__main__":
    from hpo import load
    from hpo.config import parse_override
    from hpo.errors import UserError

    try:
        given = load("gpt").configure(dict(map(parse_override, sys.argv[1:]))).config
    except UserError as error:
        sys.exit(f"error: {error}")
    assert isinstance(given, Config)
    json.dump(report(given), sys.stdout, indent=2)
    print()
