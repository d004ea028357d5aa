"""What is refused before a study is written."""

from __future__ import annotations

from studies._lm.config import check_model, check_weights
from studies._lm.records import read_jsonl
from studies.dpo.config import Config

FIELDS = ("prompt", "chosen", "rejected")


def check(config: Config) -> None:
    """Raise ConfigError or DataError, in a sentence, for packages, a model or records that are not there."""
    check_model(config.model)
    check_weights(config.model)
    if config.data.path:
        read_jsonl(config.data.path, FIELDS)
