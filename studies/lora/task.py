"""Trains adapters to instructions, and evaluates them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from studies._lm.adapter import adapted
from studies._lm.base import shapes_only
from studies._lm.config import depth_of, rows_at_once
from studies._lm.merged import language_model
from studies._lm.records import split
from studies._lm.text import IGNORED, Samples, batches, padded, tokenizer, tokens_of
from studies.lora.config import Config, records
from trainer.data import Padded
from trainer.data.text import Tokenizer
from trainer.losses import causal_contrastive, cross_entropy, weighted_sum
from trainer.task import LanguageModel, Loss, Task

Batch = dict[str, Tensor]


class LoraTask(Task):
    """Cross-entropy of the tokens of responses.

    On the held-back records it also measures the share of responses of which every token is the likeliest one, which
    greedy decoding would give.
    """

    config: Config
    unit = "tokens"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.depth = depth_of(config.model)

    @cached_property
    def text(self) -> Tokenizer:
        return tokenizer(self.config.model)

    def of_depth(self, depth: int) -> LoraTask:
        model = self.config.model.model_copy(update={"layers": depth})
        return LoraTask(self.config.model_copy(update={"model": model}))

    def model(self) -> nn.Module:
        return adapted(self.config.model)

    def train_set(self) -> Padded:
        return padded(self._samples[0], self.text.end)

    def largest_batch(self, size: int) -> Batch:
        shape = size, self.config.data.max_length
        tokens = torch.zeros(shape, dtype=torch.long)
        return {"tokens": tokens, "labels": tokens.clone(), "mask": torch.ones(shape, dtype=torch.bool)}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens, targets = batch["tokens"], batch["labels"][:, 1:]
        weight = self.config.loss.contrastive
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=weight > 0)
        losses = {"lm": cross_entropy(out.logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED)}
        if weight > 0:
            losses["contrastive"] = self._contrast(out.hidden_states[-1][:, :-1], targets)
        return weighted_sum(losses, {"lm": 1.0, "contrastive": weight} if weight > 0 else {"lm": 1.0})

    def _contrast(self, states: Tensor, targets: Tensor) -> Loss:
        parallel = self.config.train.parallel
        gather = parallel.ranks == parallel.data > 1  # ranks that divide the model have the same samples
        return contrast(states, targets, self.config.loss.temperature, gather=gather, held=not self.filler)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        data, device = padded(self._samples[1], self.text.end), next(model.parameters()).device
        loss, tokens, right, exact = 0.0, 0, 0, 0
        for batch in batches(data, rows_at_once(self.config.train), device):
            targets = batch["labels"][:, 1:]
            logits = model(input_ids=batch["tokens"], use_cache=False).logits[:, :-1]
            batch_loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            hit, answered = logits.argmax(dim=-1) == targets, targets != IGNORED
            loss, tokens = loss + float(batch_loss.sum), tokens + int(answered.sum())
            right, exact = right + int((hit & answered).sum()), exact + int((hit | ~answered).all(dim=1).sum())
        return {"val/loss": loss / tokens, "val/token_accuracy": right / tokens, "val/accuracy": exact / len(data)}

    def language_model(self, model: nn.Module) -> LanguageModel:
        return language_model(model, self.config.model)

    @cached_property
    def _samples(self) -> tuple[Samples, Samples]:
        data = self.config.data
        train, val = split(records(data), data.val_share, data.seed)
        return self._tokens(train), self._tokens(val)

    def _tokens(self, records: list[dict[str, str]]) -> Samples:
        data = self.config.data
        return Samples(tokens_of(self.text, record["prompt"], record["response"], data) for record in records)


def contrast(states: Tensor, targets: Tensor, temperature: float, *, gather: bool = False, held: bool = True) -> Loss:
    """Returns the causal contrastive loss of a language model's states: -log exp(1/t) / (exp(1/t) + sum_j exp(s_ij/t)).

    states: [batch, time, hidden], the last layer's, of which states[:, i] predicts targets[:, i]; targets: [batch,
    time], IGNORED outside responses. s_ij is the cosine of two states. The negatives of a response's state are those of
    all sequences that stand no later than it and predict another token: states that predict the same token may be
    alike. So a batch of one sequence has its own negatives; with `gather` those of other ranks count as well.

    This is the contrastive objective of Su et al. 2022 (arXiv 2202.06417, eq. 2), which spreads states apart, with the
    softmax of van den Oord et al. 2018 (arXiv 1807.03748, eq. 4) in place of its margin, and without states from the
    future.
    """
    times = torch.arange(states.shape[1], device=states.device).expand(targets.shape)
    # The similarities are of all states with all, so those of prompts and padding are removed first. A memory estimate
    # has only shapes: it counts every state, as if all belonged to responses.
    pick = slice(None) if shapes_only() else (targets != IGNORED).flatten()
    flat, times, groups = (x.flatten(0, 1)[pick] for x in (states, times, targets))
    valid = times.new_full(times.shape, held, dtype=torch.bool)
    loss = causal_contrastive(
        flat, flat, valid=valid, times=times, groups=groups, temperature=temperature, gather=gather
    )
    return Loss(loss.sum, loss.count)  # an anchor is its own positive, so its accuracy is always 1
