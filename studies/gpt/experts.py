"""Computes a mixture of experts in place of a block's MLP, and the losses of its router.

A router rates the experts for each token, and the token goes through the `top_k` that it rates highest, each a gated
MLP (Shazeer et al. 2017, arXiv 1701.06538). With p the softmax of the ratings, the output is the sum of the chosen
experts' outputs, each times its gate: p over the sum of the chosen p. A single expert's gate is p itself (Fedus et al.
2022, arXiv 2101.03961, eq. 2), since p over itself would be 1 whatever the router computes, and it would learn nothing.

The group in which an expert's capacity is shared, and over which loads are balanced, is a row of tokens (Lepikhin et
al. 2020, arXiv 2006.16668, section 2.2). So neither depends on how many rows are computed at once, and accumulated
micro-batches and several ranks compute what one large batch does. Of a row the earlier tokens come first, so that no
token depends on a later one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from studies.gpt.model import GatedMLP, Recalls
from trainer.compat.tensors import is_fake

if TYPE_CHECKING:
    from trainer.distributed.expert_parallel import Exchange


@dataclass(frozen=True)
class Route:
    """The routing of one call of one block.

    logits   [batch, length, experts], the router's ratings, in float32 at least
    chosen   [batch, length, top_k], the numbers of the experts
    kept     [batch, length, top_k], False where the expert was full; None without a capacity
    """

    logits: Tensor
    chosen: Tensor
    kept: Tensor | None

    @property
    def choices(self) -> Tensor:
        """Returns [batch, length, experts], how often each token has chosen each expert, 0 or 1."""
        return _are(self.chosen, self.logits.shape[-1]).any(-2)


_ROUTES: ContextVar[list[Route] | None] = ContextVar("routes", default=None)


@contextmanager
def recorded() -> Iterator[list[Route]]:
    """Yields a list to which each call of `Experts` within the block adds its route, in the order of the calls."""
    routes: list[Route] = []
    token = _ROUTES.set(routes)
    try:
        yield routes
    finally:
        _ROUTES.reset(token)


class Router(nn.Module):
    """Rates the experts: x [..., hidden] -> [..., experts], in float32 at least also under autocast."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.weight.to(wide))


class Experts(Recalls):
    """x [batch, length, hidden] -> the same shape; the weights of all experts are rows of three tensors.

    slots: the number of a row's tokens that an expert takes; None: any. shared: the number of experts that take all
    tokens, which are one MLP of as many times the width. Between `remember` and `forget` it keeps the numbers of
    tokens that each expert was given before, [batch, experts].
    """

    def __init__(
        self,
        hidden: int,
        mlp: int,
        *,
        experts: int,
        top_k: int,
        slots: int | None = None,
        shared: int = 0,
        activation: type[nn.Module] = nn.SiLU,
    ) -> None:
        super().__init__()
        self.experts, self.top_k, self.slots = experts, top_k, slots
        self.router = Router(hidden, experts)
        self.gate, self.up = (nn.Parameter(torch.empty(experts, hidden, mlp)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, mlp, hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        self.shared = GatedMLP(hidden, shared * mlp, activation) if shared else None
        self.activation = activation()
        self.owners: Exchange | None = None  # on ranks that hold some of the experts

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        gates, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        kept = None if self.slots is None else self._kept(chosen, self.slots)
        if (routes := _ROUTES.get()) is not None:
            routes.append(Route(logits, chosen, kept))
        tokens, per_token = x.flatten(0, 1), (-1, self.top_k)
        outputs = self._outputs(tokens, chosen.view(per_token), None if kept is None else kept.view(per_token))
        mixed = (outputs * gates.view(*per_token, 1).to(outputs.dtype)).sum(1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _kept(self, chosen: Tensor, slots: int) -> Tensor:
        """Returns which choices [batch, length, top_k] find a free slot, those of earlier tokens first."""
        choices = _are(chosen.flatten(1), self.experts).long()
        counts = choices.cumsum(1)
        if self.past is not None:
            if self.past:
                counts = counts + self.past[0][0][:, None]
            self.past = [(counts[:, -1],)]
        places = (counts * choices).sum(-1)  # from 1: the number of choices of the same expert up to this one
        return (places <= slots).view_as(chosen)

    def _outputs(self, tokens: Tensor, chosen: Tensor, kept: Tensor | None) -> Tensor:
        """Returns the outputs of the chosen experts [tokens, top_k, hidden], 0 for a choice that is not kept."""
        numbers = chosen if kept is None else torch.where(kept, chosen, self.experts)
        order = numbers.flatten().argsort(stable=True)  # by expert, and those that are not kept at the end
        rows = tokens[order // self.top_k]
        *sizes, left = self._sizes(numbers, len(tokens))
        taken, dropped = rows.split([len(rows) - left, left])
        if self.owners is None:
            computed = torch.cat(self._computed(taken.split(sizes)))
        else:
            computed = self.owners.computed(taken, sizes, self._computed)
        by_expert = torch.cat([computed, computed.new_zeros(dropped.shape)])
        return by_expert[order.argsort()].view(*chosen.shape, tokens.shape[-1])

    def _computed(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of the experts that this process holds, each of its own tokens [tokens, hidden]."""
        local = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        weights = zip(parts, *(weight.unbind() for weight in local), strict=True)
        return [(self.activation(part @ gate) * (part @ up)) @ down for part, gate, up, down in weights]

    def _sizes(self, numbers: Tensor, tokens: int) -> list[int]:
        """Returns the number of choices that each expert takes, and last the number of choices that none takes.

        Tensors without values, by which operations and memory are counted, are taken to be shared evenly.
        """
        total = tokens * self.top_k
        if is_fake(numbers):
            sizes = [total // self.experts + (number < total % self.experts) for number in range(self.experts)]
        else:
            sizes = _are(numbers.flatten(), self.experts).sum(0).tolist()
        return [*sizes, total - sum(sizes)]


def _are(numbers: Tensor, experts: int) -> Tensor:
    """Returns [..., experts], True where an entry of `numbers` [...] is that expert's."""
    return numbers[..., None] == torch.arange(experts, device=numbers.device)


def slots(capacity: float | None, *, top_k: int, experts: int, length: int) -> int | None:
    """Returns the number of a row's tokens that an expert takes: `capacity` times an even share (Fedus et al., eq. 3).

    It is rounded up.
    """
    return None if capacity is None else math.ceil(capacity * top_k * length / experts)


def balance_loss(route: Route, counted: Tensor) -> Tensor:
    """Returns the summed load balancing loss of a block over the tokens where `counted` [batch, length] is true.

    Of a row it is N sum_i f_i P_i for each counted token (Fedus et al. 2022, eqs. 4 to 6), with f_i the share of the
    counted tokens' choices that fall on expert i of N, and P_i the mean of p_i. It is 1 for each token if all loads are
    even.
    """
    weight = counted[..., None].to(route.logits.dtype)
    number = weight.sum(1).clamp(min=1)
    shares = (route.choices * weight).sum(1) / (number * route.chosen.shape[-1])
    means = (route.logits.softmax(-1) * weight).sum(1) / number
    per_token = route.logits.shape[-1] * (shares * means).sum(-1)
    return (per_token * counted.sum(1)).sum()


def z_loss(route: Route, counted: Tensor) -> Tensor:
    """Returns the sum of log(sum_i exp x_i)^2 over the counted tokens, x their logits.

    Its mean is the router z-loss of Zoph et al. 2022, arXiv 2202.08906, eq. 5.
    """
    return torch.where(counted, route.logits.logsumexp(-1).square(), 0.0).sum()


class Load:
    """The loads of the experts of all blocks over an evaluation.

    chosen    [blocks, experts], the number of counted tokens that chose each expert
    dropped   the number of choices that the experts had no slot for
    """

    def __init__(self) -> None:
        self.chosen = torch.zeros(())
        self.dropped = 0.0

    def add(self, routes: Sequence[Route], counted: Tensor) -> None:
        """Adds the routes of all blocks for the tokens where `counted` [batch, length] is true."""
        chosen = [(route.choices & counted[..., None]).sum((0, 1)) for route in routes]
        self.chosen = self.chosen + torch.stack(chosen).double().cpu()
        for route in routes:
            if route.kept is not None:
                self.dropped += float((~route.kept & counted[..., None]).sum())

    @property
    def shares(self) -> Tensor:
        """Returns the loads [blocks, experts] over the even one."""
        return self.chosen / self.chosen.mean(-1, keepdim=True)

    @property
    def dead(self) -> list[tuple[int, int]]:
        """Returns the block and the number of each expert that no token has chosen, from 0."""
        return [(block, expert) for block, expert in (self.chosen == 0).nonzero().tolist()]

    def metrics(self) -> dict[str, float]:
        """Returns the largest and the least load of an expert over the even one, how many are dead, and the share of
        choices that were dropped.
        """
        loads = {"expert_load_max": float(self.shares.max()), "expert_load_min": float(self.shares.min())}
        dropped = self.dropped / float(self.chosen.sum())
        return loads | {"dead_experts": float(len(self.dead)), "dropped_tokens": dropped}
