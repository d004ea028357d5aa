"""How the gpt is trained and judged."""

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
from studies.gpt.model import Llama
from trainer.data import Mixture, next_tokens
from trainer.losses import cross_entropy
from trainer.task import Loss, Task


class GptTask(Task):
    """Predicts each token of a document by those before it; the loss is in nats per token."""

    unit = "tokens"
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.data = config.data

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.data, self.shared)

    def model(self) -> nn.Module:
        model = Llama(self.data.vocab_size, **sizes(self.config))
        if self.config.model.weights:
            llama.load(model, self.config.model.weights)
        return model

    def train_set(self) -> Mixture:
        return self.rows

    @cached_property
    def rows(self) -> Mixture:
        return train_rows(self.tokens, self.config)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        tokens, documents = batch["tokens"], batch["documents"]
        return cross_entropy(model(tokens, documents), next_tokens(tokens, documents))

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        """Columns of q, k, v (whole heads) and of gate and up, rows of what follows; the sequence divided between."""
        plan = {"embed.tokens": "scatter", "blocks.*.norm?": "sequence", "head.norm": "sequence"}
        plan |= {"blocks.*.attend": "gather", "blocks.*.mlp": "gather", "head.logits": "gather"}
        plan |= {f"blocks.*.attend.{name}": "colwise" for name in "qkv"} | {"blocks.*.attend.o": "rowwise_scatter"}
        plan |= {f"blocks.*.mlp.{name}": "colwise" for name in ("gate", "up")}
        return plan | {"blocks.*.mlp.down": "rowwise_scatter"}

    def pipeline_plan(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Llama)
        return model.parts()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Of the target domain `val/loss` in nats per token, `val/perplexity` and `val/bits_per_byte`; of the general
        one `val/general_loss` and so on. With the generated corpus `val/floor` is the loss of the source itself, and
        `val/excess` what is above it. With data.test the same as `test/...`.
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
        """What the model writes by now, as `samples/epoch-N.txt`."""
        asked, tokenizer = self.config.samples, self.tokens.tokenizer
        if asked.tokens == 0:
            return {}
        written = []
        for prompt in asked.prompts:
            ids = [tokenizer.end, *tokenizer.encode(prompt)]
            new = generate(
                model,
                ids,
                asked.tokens,
                length=self.data.block_size,
                end=tokenizer.end,
                temperature=asked.temperature,
            )
            written.append(prompt + tokenizer.decode(new))
        epoch = round(self.progress * self.config.train.num_epochs)
        return {f"samples/epoch-{epoch:04d}.txt": "\n---\n".join(written) + "\n"}

    def _judged(self, model: nn.Module, domain: str, part: str) -> dict[str, float]:
        nats, count = self._spent(model, domain, part)
        loss, name = nats / count, (domain, part)
        file = self.tokens.files[name]
        predicted = (len(file) - file.num_documents) / self.tokens.bytes[name]  # a byte; a document begins with its end
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        found["bits_per_byte"] = loss * predicted / math.log(2)
        if (floor := self.tokens.nats[name]) is not None:
            found |= {"floor": floor / count, "excess": loss - floor / count}
        return found

    def _spent(self, model: nn.Module, domain: str, part: str) -> tuple[float, float]:
        """(nats, tokens predicted) over all rows of a part."""
        device = next(model.parameters()).device
        rows = self.tokens.packed(domain, part, self.data.block_size, seed=0)
        nats, count = 0.0, 0.0
        train = self.config.train
        size = 1 if train.micro_batch_size == "auto" else train.micro_batch_size or train.batch_size
        for part_of in torch.arange(len(rows)).split(size):
            samples = [rows[i] for i in part_of.tolist()]
            batch = {name: torch.stack([one[name] for one in samples]).to(device) for name in ("tokens", "documents")}
            loss = self.loss(model, batch)
            nats, count = nats + float(loss.sum), count + float(loss.count)
        return nats, count


def sizes(config: Config) -> dict[str, Any]:
    """What `Llama` takes, besides the vocabulary."""
    model = config.model
    return model.model_dump(exclude={"mlp_size", "weights"}) | {"mlp_size": model.mlp}
