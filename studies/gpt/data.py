"""Packs the tokens of a configuration into rows, and mixes the domains by the run's phase."""

from __future__ import annotations

import math

from studies._lm.token_files import Tokens
from studies.gpt.budget import rows
from studies.gpt.config import Config, DataConfig
from trainer.data import Mixture, Packed, TokenDocuments


def packed(tokens: Tokens, domain: str, part: str, length: int, seed: int, *, begins: bool = False) -> Packed:
    """Returns the documents of a part in rows of `length` tokens."""
    documents = TokenDocuments(tokens.files[domain, part])
    return Packed(documents, length, seed=seed, pad_id=tokens.tokenizer.end, begins=begins)


def train_rows(tokens: Tokens, config: Config, *, begins: bool = False) -> Mixture:
    """Returns rows of all domains by the ratios of the phases; for a single domain, all of it."""
    data, epochs = config.data, config.train.num_epochs
    sources = [
        packed(tokens, domain, "train", data.block_size, config.train.seed, begins=begins) for domain in tokens.domains
    ]
    ratios = phase_ratios(data, epochs) if len(sources) > 1 else {0: (1.0,)}
    first = ratios.pop(0)
    return Mixture(list(zip(sources, first, strict=True)), size=rows(config), phases=ratios)


def phase_ratios(data: DataConfig, num_epochs: int) -> dict[int, tuple[float, float]]:
    """Returns first epoch of a phase -> shares of (general, target). An epoch takes the phase it begins in."""
    first = {math.ceil(phase.start * num_epochs - 1e-9): phase.target for phase in data.phases}
    return {epoch: (1 - target, target) for epoch, target in first.items() if epoch < num_epochs}
