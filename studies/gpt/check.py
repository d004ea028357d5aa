"""Checks the texts, the tokenizer and the weights to start from, before a study is written."""

from __future__ import annotations

from typing import Any

from studies._lm.check import check_texts
from studies.gpt import llama
from studies.gpt.budget import report
from studies.gpt.config import Config


def check(config: Config) -> dict[str, Any]:
    """Returns the data report. Raises DataError or ConfigError for unusable texts, tokenizers and weights."""
    llama.check(config)
    return check_texts(config.data) | report(config)
