"""Text as tokens for a causal language model: prompts are read, responses are learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from studies._lm.config import ModelConfig
from studies._lm.records import too_long
from trainer.data import Padded
from trainer.data.text import Bytes, Tokenizer
from trainer.errors import ConfigError
from trainer.files.paths import expanded

IGNORED = -100


class Pretrained:
    """The tokenizer of a model's directory. `begin` is what every text begins with, `end` what a response ends with."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"the tokenizer in {str(directory)!r} cannot be read: {reason}") from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {str(directory)!r} has no token for the end: set its eos_token.")
        self.end: int = self._tokenizer.eos_token_id
        self.vocab_size: int = len(self._tokenizer)
        self.begin = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def tokenizer(config: ModelConfig) -> Tokenizer:
    """The one of the model's directory, or bytes."""
    if not config.path or config.tokenizer == "bytes":
        return Bytes()
    return Pretrained(expanded(config.path))


def tokens_of(text: Tokenizer, prompt: str, response: str, max_length: int) -> dict[str, Tensor]:
    """`tokens` of prompt, response and end, cut after `max_length`, and their `labels`: the tokens of the response and
    the end, IGNORED in place of the prompt's. Raises DataError where the cut leaves no response."""
    begin = [*getattr(text, "begin", ()), *text.encode(prompt)]
    if len(begin) >= max_length:
        raise too_long(prompt, len(begin), max_length)
    answer = [*text.encode(response), text.end]
    tokens = torch.tensor([*begin, *answer][:max_length])
    labels = tokens.clone()
    labels[: len(begin)] = IGNORED
    return {"tokens": tokens, "labels": labels}


class Samples(list[dict[str, Tensor]]):
    """Samples in memory, which no random number is drawn for."""

    draws = False


def padded(samples: Sequence[dict[str, Tensor]], end: int) -> Padded:
    """`samples` in batches padded on the right: a causal model reads nothing after a token, so it needs no mask. What
    is named `...labels` is padded by IGNORED, the rest by `end`."""
    return Padded(Samples(samples), {name: IGNORED if name.endswith("labels") else end for name in samples[0]})


def batches(data: Padded, rows: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """All of `data` in its order, at most `rows` samples at a time, on `device`."""
    for start in range(0, len(data), rows):
        batch = data.__getitems__(range(start, min(start + rows, len(data))))
        yield {name: tensor.to(device) for name, tensor in batch.items()}
