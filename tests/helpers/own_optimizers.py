"""Optimizers as users write them: `train.optim.name=own_optimizers:Double`."""

from __future__ import annotations

import torch


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0, "unread": (1, 2)})

    @property
    def params(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class Double(Own):
    """A sum in float64 beside weights in float32."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params:
            total = self.state[p].setdefault("sum", torch.zeros_like(p, dtype=torch.float64))
            total.mul_(0.9).add_(p.grad.double())
            p.sub_((0.05 * total).float())


class Signs(Own):
    """A mask of where a gradient has been positive."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params:
            seen = self.state[p].setdefault("seen", torch.zeros_like(p, dtype=torch.bool))
            seen |= p.grad > 0
            p.sub_(0.05 * p.grad * seen)


class Counts(Own):
    """What torch's loader and JSON would change: whole numbers, texts, tuples, keys that are numbers, and a counter of
    all parameters together."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["steps"] = steps = self.state["all"].get("steps", 0) + 1
        for p in self.params:
            state = self.state[p]
            if not state:
                state.update(count=torch.zeros_like(p, dtype=torch.int64), mode="sum", parts={0: (1.0, p.new_zeros(2))})
            assert state["mode"] == "sum" and isinstance(state["parts"][0], tuple)
            state["count"] += p.grad > 0
            state["parts"] = {0: (state["parts"][0][0] / 2, state["parts"][0][1] + 1)}
            p.sub_(0.05 * p.grad * state["count"] / steps + state["parts"][0][0] * 1e-3 * state["parts"][0][1].sum())


class Groups(Own):
    """Counters in the groups, as of Prodigy and schedule-free: one from the start, one that the first step makes."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = group.get("d", torch.tensor(1.0, dtype=torch.float64)) * 0.9
            for p in group["params"]:
                p.sub_(float(group["d"]) * 0.05 * p.grad / group["k"] ** 0.5)


class Local(Own):
    """A counter in the groups that follows the gradients of the parameters that this process steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        for p in self.params:
            p.sub_(0.05 * p.grad)
