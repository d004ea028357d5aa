"""Trains and evaluates the gpt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from studies.gpt import llama
from studies.gpt.budget import flops, parameters
from studies.gpt.config import Config
from studies.gpt.data import Tokens, train_rows
from studies.gpt.generate import generate
from studies.gpt.model import Llama, Plain
from trainer.data import Mixture, next_tokens
from trainer.data.loader import to_device
from trainer.data.view import collate
from trainer.losses import cross_entropy
from trainer.losses.vocabulary import in_blocks, linear_cross_entropy
from trainer.model.attention import attention, within
from trainer.runtime.device import pick_device
from trainer.task import Loss, Task


class Kernels(Plain):
    """The trainer's functions: a flash kernel that keeps documents apart if the device has it, and a loss in blocks."""

    attend = staticmethod(attention)
    mask = staticmethod(within)

    @staticmethod
    def loss(x: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
        if type(head) is nn.Linear and not head._forward_pre_hooks:
            return linear_cross_entropy(x, head.weight, targets).sum
        return cross_entropy(head(x), targets).sum  # a layer in float8, or one whose input is divided among ranks


class GptTask(Task):
    """Predicts each token of a document from the earlier ones; the loss is in nats per token."""

    unit = "tokens"
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.data = config.data

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.data, self.shared)

    def model(self) -> nn.Module:
        model = Llama(self.data.vocab_size, **sizes(self.config), kernels=Kernels)
        if self.config.model.weights:
            llama.load(model, self.config.model.weights)
        return model

    def train_set(self) -> Mixture:
        return self.rows

    @cached_property
    def rows(self) -> Mixture:
        return train_rows(self.tokens, self.config, begins=self.begins)

    @cached_property
    def begins(self) -> bool:
        """Returns True if batches have the documents' offsets, which attention on a GPU uses and lanes do not."""
        return pick_device(self.config.train.device).type == "cuda" and self.config.train.fixed_lanes == 1

    @cached_property
    def whole(self) -> bool:
        """Returns True if each row of the training set is one document."""
        return all(source.most_documents == 1 for source in self.rows.sources)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        return self._loss(model, batch, whole=self.begins and self.whole)

    def _loss(self, model: nn.Module, batch: Mapping[str, Tensor], *, whole: bool) -> Loss:
        """Returns the loss of rows, `whole` if each is one document.

        The model computes it itself if there are too many logits to hold at once.
        """
        tokens, documents, begins = batch["tokens"], batch["documents"], batch.get("begins")
        targets, begins = next_tokens(tokens, documents), begins[:0] if whole and begins is not None else begins
        if not in_blocks(targets.numel(), self.data.vocab_size):
            return cross_entropy(model(tokens, documents, begins=begins), targets)
        return Loss(model(tokens, documents, targets, begins), (targets >= 0).sum())

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        """Returns the plan: columns of q, k, v (whole heads), gate and up, rows of the layers after them.

        The sequence is divided in between.
        """
        plan = {"embed.tokens": "scatter", "blocks.*.norm?": "sequence", "head.norm": "sequence"}
        plan |= {"blocks.*.attend": "gather", "blocks.*.mlp": "gather", "head.logits": "gather"}
        plan |= {f"blocks.*.attend.{name}": "colwise" for name in "qkv"} | {"blocks.*.attend.o": "rowwise_scatter"}
        plan |= {f"blocks.*.mlp.{name}": "colwise" for name in ("gate", "up")}
        return plan | {"blocks.*.mlp.down": "rowwise_scatter"}

    def pipeline_plan(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Llama)
        return model.parts()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns for the target domain `val/loss` in nats per token, `val/perplexity` and `val/bits_per_byte`.

        The general domain has `val/general_loss` and so on. With the generated corpus `val/floor` is the loss of the
        source itself, and `val/excess` the difference from it. With data.test the same is returned as `test/...`.
        """
        metrics: dict[str, float] = {}
        for part in ("val", "test") if self.data.test else ("val",):
            for domain in self.tokens.domains:
                prefix = f"{part}/" if domain == "target" else f"{part}/{domain}_"
                metrics |= {prefix + name: value for name, value in self._judged(model, domain, part).items()}
        seen = self.progress * len(self.rows) * self.config.train.num_epochs * self.data.block_size
        size = parameters(self.config.model, self.data.vocab_size)
        return metrics | {"budget/tokens": seen, "budget/flops": flops(size, seen)}

    def artifacts(self, model: nn.Module) -> dict[str, str]:
        """Returns texts of the current model, as `samples/epoch-N.txt`."""
        settings, tokenizer = self.config.samples, self.tokens.tokenizer
        if settings.tokens == 0:
            return {}
        written = []
        for prompt in settings.prompts:
            ids = [tokenizer.end, *tokenizer.encode(prompt)]
            new = generate(
                model,
                ids,
                settings.tokens,
                length=self.data.block_size,
                end=tokenizer.end,
                temperature=settings.temperature,
            )
            written.append(prompt + tokenizer.decode(new))
        epoch = round(self.progress * self.config.train.num_epochs)
        return {f"samples/epoch-{epoch:04d}.txt": "\n---\n".join(written) + "\n"}

    def _judged(self, model: nn.Module, domain: str, part: str) -> dict[str, float]:
        nats, count = self._spent(model, domain, part)
        loss, name = nats / count, (domain, part)
        file = self.tokens.files[name]
        # Tokens per byte; a document begins with its end token.
        predicted = (len(file) - file.num_documents) / self.tokens.bytes[name]
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        metrics["bits_per_byte"] = loss * predicted / math.log(2)
        if (floor := self.tokens.nats[name]) is not None:
            metrics |= {"floor": floor / count, "excess": loss - floor / count}
        return metrics

    def _spent(self, model: nn.Module, domain: str, part: str) -> tuple[float, float]:
        """Returns (nats, tokens predicted) over all rows of a part."""
        device = next(model.parameters()).device
        rows = self.tokens.packed(domain, part, self.data.block_size, seed=0, begins=self.begins)
        nats, count = 0.0, 0.0
        train = self.config.train
        size = 1 if train.micro_batch_size == "auto" else train.micro_batch_size or train.batch_size
        for part_of in torch.arange(len(rows)).split(size):
            samples = [rows[i] for i in part_of.tolist()]
            loss = self._loss(model, to_device(collate(rows)(samples), device), whole=rows.most_documents == 1)
            nats, count = nats + float(loss.sum), count + float(loss.count)
        return nats, count


def sizes(config: Config) -> dict[str, Any]:
    """Returns the arguments of `Llama`, other than the vocabulary."""
    model = config.model
    return model.model_dump(exclude={"mlp_size", "weights"}) | {"mlp_size": model.mlp}
