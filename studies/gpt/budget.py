"""Relates parameters, tokens and operations: how large a model, and how long to train it. Torch-free.

Hoffmann et al. 2022 (arXiv 2203.15556): training N parameters (all of them, embeddings too) on D tokens takes about
C = 6 N D operations, and for a given C the lowest loss is reached where N and D grow alike, each about as C^0.5 (their
approaches 1 and 2, table 2). At the sizes they trained (table 3) that is about 20 tokens for each parameter, hence
N = sqrt(C / 120). The constants of their approach 3, the fitted loss, were found not to follow from its data (Besiroglu
et al. 2024, arXiv 2404.10102), so it is not used here. Small models of bytes are far from where this was measured.

Of a mixture of experts N counts what a token meets: its operations are those of the active parameters.

python -m studies.gpt.budget [PATH=VALUE ...]     for a configuration
python -m studies.gpt.budget --flops 1e18         the optimum for this many operations
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from studies.gpt.config import Config, ModelConfig

SOURCE = "Hoffmann et al. 2022 (arXiv 2203.15556), approaches 1 and 2: N = sqrt(C / 120), D = 20 N"
TOKENS_PER_PARAMETER = 20
FLOPS_PER_PARAMETER_AND_TOKEN = 6  # two for the product forward, four for both gradients; attention not counted


def parameters(model: ModelConfig, vocab_size: int, length: int = 0) -> int:
    """Returns the number of the model's parameters, for rows of `length` tokens if it learns their positions."""
    learned = length * model.hidden_size if model.position.kind == "learned" else 0
    return _size(model, vocab_size, model.moe.experts) + learned


def active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Returns the number of parameters that compute with a token.

    Of the experts these are `top_k` and those that all share. Learned positions are looked up, and do not count.
    """
    return _size(model, vocab_size, model.moe.top_k)


def _size(model: ModelConfig, vocab_size: int, experts: int) -> int:
    h, kv, moe = model.hidden_size, model.hidden_size // model.num_heads * model.num_kv_heads, model.moe
    mlps, router = (experts + moe.shared, moe.experts * h) if model.mixed else (1, 0)
    block = 2 * h * h + 2 * h * kv + 3 * h * model.mlp * mlps + router + 2 * h
    return model.num_layers * block + h + (1 if model.tie else 2) * vocab_size * h


def flops(parameters: int, tokens: float) -> float:
    """Returns C = 6 N D."""
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens)


def optimal(budget: float) -> tuple[float, float]:
    """Returns the optimal (parameters, tokens) for `budget` operations."""
    size = math.sqrt(budget / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER))
    return size, TOKENS_PER_PARAMETER * size


def rows(config: Config) -> int | None:
    """Returns the rows of an epoch with which the run sees data.tokens_per_parameter; None if that is not set."""
    if config.data.tokens_per_parameter is None:
        return None
    tokens = config.data.tokens_per_parameter * active_parameters(config.model, config.data.vocab_size)
    return max(round(tokens / config.data.block_size / config.train.num_epochs), 1)


def report(config: Config) -> dict[str, Any]:
    """Returns the model's size and the cost of training it on 20 tokens for each active parameter."""
    sizes = {"parameters": parameters(config.model, config.data.vocab_size, config.data.block_size)}
    active = active_parameters(config.model, config.data.vocab_size)
    sizes |= {"active_parameters": active} if config.model.mixed else {}
    tokens = TOKENS_PER_PARAMETER * active
    return sizes | {"compute_optimal_tokens": tokens, "compute_optimal_flops": round(flops(active, tokens))}


def _operations(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of operations: give one, such as 1e18.")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    from hpo import load
    from hpo.errors import UserError
    from hpo.space.config import parse_override

    parser = argparse.ArgumentParser(prog="python -m studies.gpt.budget", description="Parameters, tokens, operations.")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="of the study's configuration")
    parser.add_argument("--flops", type=_operations, help="the parameters and tokens that make the best of so many")
    options = parser.parse_args(arguments)
    if options.flops is not None:
        if options.overrides:
            parser.error(f"--flops reads no configuration: leave {options.overrides[0]} out.")
        size, tokens = optimal(options.flops)
        facts = {"compute_optimal_parameters": round(size), "compute_optimal_tokens": round(tokens), "source": SOURCE}
    else:
        try:
            config = load("gpt").configure(dict(map(parse_override, options.overrides))).config
        except UserError as error:
            parser.exit(2, f"error: {error}\n")
        assert isinstance(config, Config)
        facts = report(config)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
