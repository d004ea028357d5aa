"""Holds the answers that a policy draws and is trained on: the order of their prompts, and their place in the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.runtime.seeding import shuffled


class Rollout(NamedTuple):
    """Answers to a batch of prompts, with whatever was known when they were drawn.

    tokens: [batch, prompt and time]; the others by tokens of the answer, [batch, time], or by answers, [batch].
    """

    tokens: Tensor
    mask: Tensor  # true for an answer's tokens, its end included
    old: Tensor  # log-probabilities under the policy that has drawn the answers
    reference: Tensor  # those under the reference
    values: Tensor  # of the states before the tokens; 0 without a value function
    rewards: Tensor  # learnt rewards of whole answers

    @property
    def divergence(self) -> Tensor:
        """Returns the mean over answers of log old - log reference, in nats."""
        return torch.where(self.mask, self.old - self.reference, 0.0).sum(dim=1).mean()

    @classmethod
    def empty(cls, batch: int, prompt: int, time: int) -> Rollout:
        old, reference, values = (torch.zeros(batch, time) for _ in range(3))
        tokens, mask = torch.zeros(batch, prompt + time, dtype=torch.long), torch.ones(batch, time, dtype=torch.bool)
        return cls(tokens, mask, old, reference, values, torch.zeros(batch))


class Kept(nn.Module):
    """The last rollout, and the coefficient `beta` it is trained with, as buffers: checkpoints hold them.

    So a run that was interrupted between two steps on the same answers goes on with these.
    """

    number: Tensor
    beta: Tensor

    def __init__(self, batch: int, prompt: int, time: int, beta: float) -> None:
        super().__init__()
        for name, tensor in Rollout.empty(batch, prompt, time)._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("number", torch.tensor(-1))  # of the rollout; -1: there is none yet
        self.register_buffer("beta", torch.tensor(beta))

    def rollout(self) -> Rollout:
        return Rollout(*(self.get_buffer(name) for name in Rollout._fields))

    def holds(self, number: int, prompts: Tensor) -> bool:
        """Returns True if the rollout kept is this one, of these prompts [batch, prompt]."""
        tokens = self.get_buffer("tokens")[:, : prompts.shape[1]]
        return int(self.number) == number and torch.equal(tokens, prompts)

    def keep(self, number: int, rollout: Rollout, beta: Tensor) -> None:
        for name, tensor in rollout._asdict().items():
            self.get_buffer(name).copy_(tensor)
        self.number.fill_(number)
        self.beta.copy_(beta)


class Prompts:
    """A data set of prompts to be answered, whose order has each batch of them `steps` times in succession.

    Its index is a prompt's place; in a batch each prompt stands `group` times in succession. An epoch goes through the
    prompts in a random order, again and again if it needs more.
    """

    draws = False
    by_batch_size = True

    def __init__(self, tokens: Tensor, answers: int, group: int, steps: int) -> None:
        self.tokens, self.answers, self.group, self.steps = tokens, answers, group, steps

    def __len__(self) -> int:
        return self.answers * self.steps

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {"prompt": self.tokens[torch.as_tensor(indices)]}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"prompt": self.tokens[index]}

    def order(self, seed: int, epoch: int, batch_size: int) -> list[int]:
        prompts = shuffled(seed, epoch, len(self.tokens))
        drawn = [prompts[i // self.group % len(prompts)] for i in range(self.answers)]
        starts = range(0, self.answers, batch_size)
        return [place for start in starts for place in drawn[start : start + batch_size] * self.steps]
