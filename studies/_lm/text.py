"""Turns text into tokens for a causal language model: prompts are read, responses are learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from studies._lm.config import DataConfig, ModelConfig
from studies._lm.records import too_long
from trainer.data import Padded
from trainer.data.text import Bytes, Tokenizer, as_text
from trainer.errors import ConfigError
from trainer.files.paths import expanded

IGNORED = -100


class Pretrained:
    """The tokenizer of a model's directory. `begin` starts every text, `end` ends a response.

    A text is data: a special token spelled in it is encoded like any other characters; `parse` takes such a spelling as
    the token.
    """

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
        return as_text(partial(self._ids, split_special_tokens=True), text, self.end, self._tokenizer.eos_token)

    def parse(self, text: str) -> list[int]:
        return self._ids(text, split_special_tokens=False) if text else []

    def _ids(self, text: str, *, split_special_tokens: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def tokenizer(config: ModelConfig) -> Tokenizer:
    """Returns the tokenizer of the model's directory, or bytes."""
    if not config.path or config.tokenizer == "bytes":
        return Bytes()
    return Pretrained(expanded(config.path))


def prompt_of(text: Tokenizer, prompt: str, data: DataConfig) -> list[int]:
    """Returns the tokens of a prompt within the template, after the token that every text begins with."""
    before, between, _ = data.pieces
    tokens = [*_parsed(text, before), *text.encode(prompt), *_parsed(text, between)]
    begin = getattr(text, "begin", [])
    return tokens if tokens[: len(begin)] == begin else [*begin, *tokens]


def _parsed(text: Tokenizer, piece: str) -> list[int]:
    """Returns the tokens of a piece of the template; bytes spell no special ones."""
    return getattr(text, "parse", text.encode)(piece)


def tokens_of(text: Tokenizer, prompt: str, response: str, data: DataConfig) -> dict[str, Tensor]:
    """Returns `tokens` of prompt, response and end, cut after `data.max_length`, and their `labels`.

    The labels are the tokens of the response and the end, and IGNORED in place of the prompt's. Raises DataError if the
    cut leaves no response.
    """
    begin, max_length = prompt_of(text, prompt, data), data.max_length
    if len(begin) >= max_length:
        raise too_long(prompt, len(begin), max_length)
    after = _parsed(text, data.pieces[2])
    answer = [*text.encode(response), *after, *([] if after[-1:] == [text.end] else [text.end])]
    tokens = torch.tensor([*begin, *answer][:max_length])
    labels = tokens.clone()
    labels[: len(begin)] = IGNORED
    return {"tokens": tokens, "labels": labels}


class Samples(list[dict[str, Tensor]]):
    """Samples in memory; reading them draws no random number."""

    draws = False


def padded(samples: Sequence[dict[str, Tensor]], end: int) -> Padded:
    """Returns `samples` in batches padded on the right.

    A causal model reads nothing after a token, so it needs no mask. Tensors named `...labels` are padded by IGNORED,
    the rest by `end`.
    """
    return Padded(Samples(samples), {name: IGNORED if name.endswith("labels") else end for name in samples[0]})


def batches(data: Padded, rows: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yields all of `data` in its order, at most `rows` samples at a time, on `device`."""
    for start in range(0, len(data), rows):
        batch = data.__getitems__(range(start, min(start + rows, len(data))))
        yield {name: tensor.to(device) for name, tensor in batch.items()}
