"""Trains and evaluates the gpt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from studies._lm.token_files import Tokens
from studies.gpt import llama
from studies.gpt.budget import active_parameters, flops
from studies.gpt.config import Config
from studies.gpt.data import packed, train_rows
from studies.gpt.experts import Experts, Load, Route, balance_loss, recorded, slots, z_loss
from studies.gpt.generate import generate
from studies.gpt.model import GatedMLP, Llama, Plain, Rotary
from studies.gpt.positions import Alibi, Learned, Scaled
from studies.gpt.reach import Reach
from trainer.data import Mixture, Packed, next_tokens
from trainer.data.loader import to_device
from trainer.data.view import collate
from trainer.finding import Finding, names
from trainer.losses import cross_entropy
from trainer.losses.vocabulary import in_blocks, linear_cross_entropy
from trainer.model.attention import attention, within
from trainer.runtime.device import pick_device
from trainer.task import LanguageModel, Loss, Task

EXPERTS = "dead experts"  # the check of `GptTask.findings`
ACTIVATIONS: dict[str, type[nn.Module]] = {"swiglu": nn.SiLU, "geglu": nn.GELU}


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
        """Returns True if batches have the documents' offsets, which attention on a GPU uses."""
        return pick_device(self.config.train.device).type == "cuda" and not self.config.masks

    @cached_property
    def whole(self) -> bool:
        """Returns True if each row of the training set is one document."""
        return all(source.most_documents == 1 for source in self.rows.sources)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        whole = self.begins and self.whole
        if not self.config.model.mixed:
            return self._loss(model, batch, whole=whole)
        with recorded() as routes:
            loss = self._loss(model, batch, whole=whole)
        return self._routed(loss, routes, _counted(batch))

    def _routed(self, loss: Loss, routes: Sequence[Route], counted: Tensor) -> Loss:
        """Returns the loss and, by their weights, the routers' losses, added up over the blocks; all are terms."""
        moe = self.config.model.moe
        balance = sum((balance_loss(route, counted) for route in routes), loss.sum.new_zeros(()))
        z = sum((z_loss(route, counted) for route in routes), loss.sum.new_zeros(()))
        terms = {"loss_tokens": loss.sum.detach(), "loss_balance": balance.detach(), "loss_z": z.detach()}
        return Loss(loss.sum + moe.balance * balance + moe.z_loss * z, loss.count, {**loss.terms, **terms})

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

    def expert_plan(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Experts)]

    def pipeline_plan(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Llama)
        return model.parts()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns for the target domain `val/loss` in nats per token, `val/perplexity` and `val/bits_per_byte`.

        The general domain has `val/general_loss` and so on. With the generated corpus `val/floor` is the loss of the
        source itself, and `val/excess` the difference from it. With data.test the same is returned as `test/...`. A
        mixture of experts adds the metrics of `Load`, and data.by_position those of `Reach`.
        """
        metrics: dict[str, float] = {}
        for part in ("val", "test") if self.data.test else ("val",):
            for domain in self.tokens.domains:
                prefix = f"{part}/" if domain == "target" else f"{part}/{domain}_"
                metrics |= {prefix + name: value for name, value in self._judged(model, domain, part).items()}
                if self.data.by_position:
                    reach = self._reach(model, domain, part)
                    metrics |= {prefix + name: value for name, value in reach.metrics().items()}
        seen = self.progress * len(self.rows) * self.config.train.num_epochs * self.data.block_size
        size = active_parameters(self.config.model, self.data.vocab_size)
        return metrics | {"budget/tokens": seen, "budget/flops": flops(size, seen)}

    def language_model(self, model: nn.Module) -> LanguageModel:
        """Returns the model as Hugging Face's Llama. Raises ConfigError for a mixture of experts."""
        llama.check_savable(self.config)
        save = partial(llama.save_with_tokenizer, model.state_dict(), self.config)
        return LanguageModel(save, model, self.data.vocab_size)

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

    def findings(self, model: nn.Module) -> Sequence[Finding]:
        """Returns the finding on experts that no token of the validation part chooses."""
        if not self.config.model.mixed:
            return ()
        load = Load()
        for domain in self.tokens.domains:
            self._spent(model, domain, "val", load)
        return [_dead_experts(load)]

    def _judged(self, model: nn.Module, domain: str, part: str) -> dict[str, float]:
        load = Load()
        nats, count = self._spent(model, domain, part, load)
        loss, name = nats / count, (domain, part)
        file = self.tokens.files[name]
        # Tokens per byte; a document begins with its end token.
        predicted = (len(file) - file.num_documents) / self.tokens.bytes[name]
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        metrics["bits_per_byte"] = loss * predicted / math.log(2)
        if (floor := self.tokens.nats[name]) is not None:
            metrics |= {"floor": floor / count, "excess": loss - floor / count}
        return metrics | (load.metrics() if self.config.model.mixed else {})

    def _spent(self, model: nn.Module, domain: str, part: str, load: Load) -> tuple[float, float]:
        """Returns (nats, tokens predicted) over all rows of a part, and adds the loads of experts to `load`."""
        nats, count = 0.0, 0.0
        rows = self._rows(domain, part)
        for batch in self._batches(model, rows):
            with recorded() as routes:
                loss = self._loss(model, batch, whole=rows.most_documents == 1)
            if routes:
                load.add(routes, _counted(batch))
            nats, count = nats + float(loss.sum), count + float(loss.count)
        return nats, count

    def _reach(self, model: nn.Module, domain: str, part: str) -> Reach:
        corpus = self.data.corpus
        reach = Reach(3 * corpus.keys if corpus.keys and not self.data.path and self.data.tokenizer == "bytes" else 0)
        for batch in self._batches(model, self._rows(domain, part)):
            reach.add(model(batch["tokens"], batch["documents"], begins=batch.get("begins")), batch)
        return reach

    def _rows(self, domain: str, part: str) -> Packed:
        return packed(self.tokens, domain, part, self.data.block_size, seed=0, begins=self.begins)

    def _batches(self, model: nn.Module, rows: Packed) -> Iterator[dict[str, Tensor]]:
        device, train = next(model.parameters()).device, self.config.train
        size = 1 if train.micro_batch_size == "auto" else train.micro_batch_size or train.batch_size
        for numbers in torch.arange(len(rows)).split(size):
            yield to_device(collate(rows)([rows[i] for i in numbers.tolist()]), device)


def sizes(config: Config) -> dict[str, Any]:
    """Returns the arguments of `Llama`, other than the vocabulary."""
    model, moe = config.model, config.model.moe
    plain = model.model_dump(exclude={"mlp_size", "weights", "moe", "position", "activation"})
    plain |= {"mlp_size": model.mlp, "positions": positions(config)}
    activation = ACTIVATIONS[model.activation]
    if not model.mixed:
        return plain | {"feed": partial(GatedMLP, activation=activation)}
    room = slots(moe.capacity, top_k=moe.top_k, experts=moe.experts, length=config.data.block_size)
    chosen = {"experts": moe.experts, "top_k": moe.top_k, "slots": room, "shared": moe.shared}
    return plain | {"feed": partial(Experts, **chosen, activation=activation)}


def positions(config: Config) -> Rotary:
    """Returns the positions of a configuration, for rows of `data.block_size` tokens."""
    model, position, length = config.model, config.model.position, config.data.block_size
    width, window, sinks = model.hidden_size // model.num_heads, position.window, position.sinks
    if position.kind == "alibi":
        return Alibi(width, model.num_heads, window=window, sinks=sinks)
    if position.kind == "learned":
        return Learned(width, model.hidden_size, length, window=window, sinks=sinks)
    scaling, trained = position.scaling, position.trained or length
    factor = length / trained
    return Scaled(width, model.rope_theta, scaling=scaling, trained=trained, factor=factor, window=window, sinks=sinks)


def _counted(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns [batch, length], True for the tokens whose next one is predicted."""
    return next_tokens(batch["tokens"], batch["documents"]) >= 0


def _dead_experts(load: Load) -> Finding:
    dead, (blocks, experts) = [f"expert {expert} of block {block}" for block, expert in load.dead], load.chosen.shape
    figure = (
        f"{len(dead)} of {blocks * experts} experts get no token of the validation part (none should), and the most "
        f"loaded gets {float(load.shares.max()):.3g} times an even share"
    )
    if not dead:
        return Finding(EXPERTS, "healthy", figure, 0.0)
    advice = f"{names(dead)}: raise model.moe.balance, or lower model.moe.experts or train.optim.lr."
    return Finding(EXPERTS, "dead", figure, float(len(dead)), advice)
