"""Trains reward models on generated preferences, and combines those of an ensemble."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies._lm.base import shapes_only
from studies._lm.pairs import preferences
from studies._lm.records import Record
from studies.online.config import Config
from trainer.data import pad
from trainer.data.text import Bytes

BATCH = 32  # pairs of a step


class Scorer(nn.Module):
    """A recurrent reward model: tokens [batch, time], lengths [batch] -> rewards [batch], from the state at the end.

    `mean` is that of the rewards of the answers that it has learnt from, so that its rewards have the mean 0 there: the
    preferences leave it open.
    """

    mean: Tensor

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(Bytes.vocab_size, hidden_size)
        self.read = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.read(self.embed(tokens))
        last = states[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        return self.head(last).squeeze(1) - self.mean


def records(config: Config) -> tuple[list[Record], list[str], list[str]]:
    """Returns (pairs to learn the reward from, prompts to train on, prompts to evaluate with), all different."""
    kept, trained = config.evaluation.prompts, config.data.prompts
    drawn = preferences(kept + trained + config.reward.pairs, config.data.seed)
    prompts = [record["prompt"] for record in drawn[: kept + trained]]
    return drawn[kept + trained :], prompts[kept:], prompts[:kept]


def ensemble(config: Config) -> nn.ModuleList:
    """Returns the frozen reward models; the same for every trial with these settings of rewards and data.

    An estimate of memory has none: they are some kilobytes, and torch copies no recurrent layer of fake tensors.
    """
    members = 0 if shapes_only() else config.reward.members
    return nn.ModuleList(copy.deepcopy(_member(config, i)).requires_grad_(False) for i in range(members))


def _member(config: Config, number: int) -> Scorer:
    pairs, _, _ = records(config)
    reward = config.reward
    chosen, rejected = (tuple(pair["prompt"] + pair[which] for pair in pairs) for which in ("chosen", "rejected"))
    return learnt(chosen, rejected, reward.hidden_size, reward.epochs, reward.lr, 2**20 * config.data.seed + number)


@lru_cache(maxsize=32)
def learnt(
    chosen: Sequence[str], rejected: Sequence[str], hidden_size: int, epochs: int, lr: float, seed: int
) -> Scorer:
    """Returns a reward model of the pairs, by one thread, since the weights depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            torch.manual_seed(seed)
            return _trained(Scorer(hidden_size), encoded(chosen), encoded(rejected), epochs, lr)
    finally:
        torch.set_num_threads(threads)


def encoded(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns (tokens [texts, time], each with its end; their lengths [texts])."""
    bytes_ = Bytes()
    rows = [torch.tensor([*bytes_.encode(text), bytes_.end]) for text in texts]
    return pad(rows, bytes_.end)[0], torch.tensor([len(row) for row in rows])


def _trained(
    model: Scorer, chosen: tuple[Tensor, Tensor], rejected: tuple[Tensor, Tensor], epochs: int, lr: float
) -> Scorer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(chosen[0])).split(BATCH):
            better = model(chosen[0][rows], chosen[1][rows]) - model(rejected[0][rows], rejected[1][rows])
            optimizer.zero_grad()
            (-F.logsigmoid(better).mean()).backward()
            optimizer.step()
    with torch.no_grad():
        model.mean.copy_(torch.cat([model(*chosen), model(*rejected)]).mean())
    return model.eval()


def combined(rewards: Tensor, combine: str, caution: float) -> Tensor:
    """Returns the learnt reward of each answer [batch] from those of all members [members, batch]: see RewardConfig."""
    if combine == "min":
        return rewards.amin(dim=0)
    spread = rewards.std(dim=0, correction=0) if combine == "cautious" else 0.0
    return rewards.mean(dim=0) - caution * spread
