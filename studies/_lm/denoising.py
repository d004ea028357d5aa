"""Trains a model to restore what is missing of a text, which BERT and T5 have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Generator, Tensor, nn

from studies._lm.corpus_config import TextConfig
from studies._lm.token_files import Tokens, tokenizer_of
from trainer.data import Mixture, TokenBlocks
from trainer.data.loader import to_device
from trainer.data.text import BPE, Tokenizer
from trainer.errors import DataError
from trainer.losses import cross_entropy
from trainer.runtime.seeding import derive
from trainer.task import Loss, Task

Noise = Callable[[Tensor, Generator], dict[str, Tensor]]


class DenoisingTask(Task):
    """Restores tokens that `noise` takes out of rows of `data.block_size` tokens; the loss is in nats per token.

    Rows are cut from all documents one after another, each between two ends, as RoBERTa's and T5's are. What is taken
    out of a row is drawn anew in each epoch, and of a row to validate it is always the same, whatever the settings of
    the training: so losses of trials compare.
    """

    unit = "tokens"
    names: Sequence[str] = ()  # the special tokens that the model knows besides those of the tokenizer

    @property
    def data(self) -> TextConfig:
        return self.config.data

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.data, self.shared)

    @cached_property
    def vocab_size(self) -> int:
        return vocabulary_size(self.data, self.names)

    @cached_property
    def special(self) -> list[int]:
        return special_ids(self.tokens.tokenizer, self.names)

    def noise(self, *, validates: bool) -> Noise:
        """Returns what takes tokens out of a row: as the settings say, or as all trials are validated."""
        raise NotImplementedError

    def restored(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns logits [..., vocab_size] and the labels [...], -100 for none, of a batch of noisy rows."""
        raise NotImplementedError

    @cached_property
    def training_noise(self) -> Noise:
        return self.noise(validates=False)

    @cached_property
    def validating_noise(self) -> Noise:
        return self.noise(validates=True)

    def train_set(self) -> Mixture:
        sources = [self._rows(domain, "train") for domain in self.tokens.domains]
        return Mixture([(rows, float(len(rows))) for rows in sources])

    def augment(self, sample: Tensor, generator: Generator) -> dict[str, Tensor]:
        return self.training_noise(sample, generator)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        return cross_entropy(*self.restored(model, batch))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns `val/loss` of the target domain in nats per token, `val/perplexity`, and `val/accuracy`: the share of
        tokens that are restored. With data.test the same is returned as `test/...`."""
        metrics: dict[str, float] = {}
        for part in ("val", "test") if self.data.test else ("val",):
            nats, right, count = 0.0, 0.0, 0.0
            for batch in self.noisy(model, part):
                logits, labels = self.restored(model, batch)
                loss = cross_entropy(logits, labels)
                nats, count = nats + float(loss.sum), count + float(loss.count)
                right += float((logits.argmax(-1) == labels).sum())
            if not count:
                raise DataError(
                    f"no word of the {part} part of the target domain is short enough to be predicted in a row of "
                    f"data.block_size={self.data.block_size} tokens: raise it, or give text with spaces between words."
                )
            loss = nats / count
            metrics |= {f"{part}/loss": loss, f"{part}/perplexity": math.exp(min(loss, 700.0))}
            metrics[f"{part}/accuracy"] = right / count
        return metrics

    def noisy(self, model: nn.Module, part: str, size: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yields all rows of a part of the target domain on the model's device, in batches of `size`; None: as many as
        in training."""
        rows, device, train = self._rows("target", part), next(model.parameters()).device, self.config.train
        size = size or (1 if train.micro_batch_size == "auto" else train.micro_batch_size or train.batch_size)
        for numbers in torch.arange(len(rows)).split(size):
            noisy = [
                self.validating_noise(rows[row], torch.Generator().manual_seed(derive(0, part, row)))
                for row in numbers.tolist()
            ]
            yield to_device({name: torch.stack([row[name] for row in noisy]) for name in noisy[0]}, device)

    def samples(self, texts: Sequence[str]) -> dict[str, str]:
        """Returns texts of the current epoch as an artifact."""
        epoch = round(self.progress * self.config.train.num_epochs)
        return {f"samples/epoch-{epoch:04d}.txt": "\n---\n".join(texts) + "\n"}

    def written(self, ids: Sequence[int], names: Mapping[int, str]) -> str:
        """Returns tokens as text; those of `names` as they say, and an end as a line's."""
        tokenizer, names = self.tokens.tokenizer, {self.tokens.tokenizer.end: "\n", **names}
        text, pending = "", []
        for number in [*ids, None]:
            if number is None or number in names:
                text += tokenizer.decode(pending) + ("" if number is None else names[number])
                pending = []
            else:
                pending.append(number)
        return text.strip("\n")

    def _rows(self, domain: str, part: str) -> TokenBlocks:
        file, length = self.tokens.files[domain, part], self.data.block_size
        if len(file) < length:
            raise DataError(
                f"the {part} part of the {domain} domain has {len(file)} tokens, fewer than a row of data.block_size="
                f"{length}: lower data.block_size, or give more text."
            )
        return TokenBlocks(file, length, overlap=0)


def special_ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """Returns the ids of special tokens: the tokenizer's own, else those that follow its ids."""
    known, added = _known(tokenizer, names), added_names(tokenizer, names)
    return [known[name] if name in known else tokenizer.vocab_size + added.index(name) for name in names]


def vocabulary_size(data: TextConfig, names: Sequence[str]) -> int:
    """Returns the tokens that a model knows: those of the tokenizer, and of `names` those that it lacks."""
    known = _known(tokenizer_of(data), names) if data.tokenizer_file else {}
    return data.vocab_size + len(names) - len(known)


def added_names(tokenizer: Tokenizer, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that the tokenizer lacks."""
    known = _known(tokenizer, names)
    return [name for name in names if name not in known]


def _known(tokenizer: Tokenizer, names: Sequence[str]) -> dict[str, int]:
    if not isinstance(tokenizer, BPE):
        return {}
    ids = {name: tokenizer.id_of(name) for name in names}
    return {name: number for name, number in ids.items() if number is not None}
