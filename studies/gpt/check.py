"""Checks the texts, the tokenizer and the weights to start from, before a study is written."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from studies.gpt import llama
from studies.gpt.budget import report
from studies.gpt.config import Config, DataConfig
from studies.gpt.corpus import prepare
from trainer.errors import ConfigError, DataError


def check(config: Config) -> dict[str, Any]:
    """Raises DataError or ConfigError for unusable texts, or a missing tokenizer package; returns the data report.

    Called before a study is written.
    """
    llama.check(config)
    if config.data.tokenizer_file:
        _check_tokenizer(config.data)
    elif config.data.tokenizer == "bpe" and find_spec("tokenizers") is None:
        raise ConfigError("data.tokenizer='bpe' needs tokenizers: pip install 'hpo[text]'.")
    corpus = prepare(config.data)
    sizes = {f"{domain}_{part}_bytes": text.bytes for domain, parts in corpus.items() for part, text in parts.items()}
    return sizes | report(config)


def _check_tokenizer(data: DataConfig) -> None:
    from trainer.data.text import BPE  # it imports torch

    try:
        BPE.load(data.tokenizer_file, data.end_token, data.tiktoken_pattern)
    except DataError as error:
        raise DataError(f"data.tokenizer_file, data.end_token: {error}") from error
