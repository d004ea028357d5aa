"""Checks the texts and the tokenizer before a study is written."""

from __future__ import annotations

from importlib.util import find_spec

from studies._lm.corpus import prepare
from studies._lm.corpus_config import TextConfig
from trainer.errors import ConfigError


def check_texts(data: TextConfig) -> dict[str, int]:
    """Returns the sizes of the texts in bytes, for the data report.

    Raises DataError or ConfigError for unusable texts, or a missing tokenizer package.
    """
    if data.tokenizer_file:
        from studies._lm.token_files import tokenizer_of  # it imports torch

        tokenizer_of(data)
    elif data.tokenizer == "bpe" and find_spec("tokenizers") is None:
        raise ConfigError("data.tokenizer='bpe' needs tokenizers: pip install 'hpo[text]'.")
    corpus = prepare(data)
    return {f"{domain}_{part}_bytes": text.bytes for domain, parts in corpus.items() for part, text in parts.items()}
