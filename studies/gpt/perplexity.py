"""Computes the perplexity of texts by an exported model of this study, for the cleaner of corpora."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import ValidationError
from safetensors.torch import load_model
from torch.nn import functional as F

from studies._lm.exported import exported
from studies._lm.token_files import tokenizer_of
from studies.gpt.config import Config
from studies.gpt.task import GptTask
from trainer.errors import DataError
from trainer.task import built

MOST_TOKENS = 2048  # of a text that are read


def scorer(file: str) -> Callable[[str], float]:
    """Returns a function of a text that returns its mean loss in nats per token: the logarithm of its perplexity.

    A text is read in pieces of the model's `data.block_size`, up to 2,048 tokens of it. One thread computes, so that a
    text has one score whatever else is computed. Raises DataError for a file that is not such a model.
    """
    about, _ = exported(file)
    try:
        config = Config.model_validate(about)
        begun = config.model.model_copy(update={"weights": ""})  # which are not where the trial had them, nor needed
        model = built(GptTask(config.model_copy(update={"model": begun}))).eval()
        load_model(model, file)  # a tied weight is in the file once
    except (ValidationError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} is not a model of the study gpt ({reason}): export one of its trials.") from error
    tokenizer, length = tokenizer_of(config.data), config.data.block_size
    torch.set_num_threads(1)

    @torch.no_grad()
    def score(text: str) -> float:
        ids = [tokenizer.end, *tokenizer.encode(text[: 4 * MOST_TOKENS])[:MOST_TOKENS]]
        total, count = 0.0, len(ids) - 1
        for start in range(0, count, length):
            row = torch.tensor([ids[start : start + length + 1]])
            logits = model(row[:, :-1])[0].float()
            total += float(F.cross_entropy(logits, row[0, 1:], reduction="sum"))
        return total / max(count, 1)

    return score
