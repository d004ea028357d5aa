"""Checks the texts, the tokenizer and the weights to start from, before a study is written."""

from __future__ import annotations

from studies._lm.check import check_texts
from studies.t5 import pretrained
from studies.t5.config import Config


def check(config: Config) -> dict[str, int]:
    """Returns the data report. Raises DataError or ConfigError for unusable texts, tokenizers and weights."""
    sizes = check_texts(config.data)
    if config.model.weights:
        from studies.t5.task import T5Task  # it imports torch

        pretrained.check(config.model, T5Task(config).vocab_size)
    return sizes
