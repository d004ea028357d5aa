"""Steps the rows of all lanes at once by elementwise optimizers: a few operations instead of a few for each lane.

They compute what torch's SGD, Adam and AdamW and `trainer.optim.lion` do, each row with its own hyperparameters; other
optimizers step each lane separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.lanes.lane import Lane

Columns = Mapping[str, Tensor]  # hyperparameters by name, [rows, 1] each


class Rows:
    """The optimizer of `lanes`, whose `weights` and `gradient` are [lanes, parameters].

    The lanes' own optimizers show its rows as their state.
    """

    def __init__(
        self, lanes: Sequence[Lane], weights: Tensor, gradient: Tensor, parts: Callable[[Tensor], Iterable[Tensor]]
    ) -> None:
        self.lanes, self.weights, self.gradient = lanes, weights, gradient
        name = lanes[0].config.optim.name
        self._update, buffers = RULES[name]
        self._fixed = [lane.config.optim.hyperparameters for lane in lanes]
        self.decay, scale = torch.zeros_like(weights), torch.ones_like(weights)
        self.kept = {buffer: torch.zeros_like(weights) for buffer in buffers}
        self._steps = weights.new_zeros(len(lanes), len([*parts(weights[0])]), dtype=torch.float32)
        self._count: list[int] = []
        self.even: list[bool] = []  # True where all parameters of a lane have taken equally many steps
        for k, lane in enumerate(lanes):
            group_of = {p: group for group in lane.state.optimizer.param_groups for p in group["params"]}
            params = [p for p in lane.state.model.parameters() if p.requires_grad]
            for row, setting in ((self.decay[k], "weight_decay"), (scale[k], "lr_scale")):
                for p, part in zip(params, parts(row), strict=True):
                    part.fill_(group_of[p][setting])
            counts = {float(lane.state.optimizer.state[p].get("step", 0.0)) for p in params}
            self._count.append(int(max(counts)))
            self.even.append(len(counts) == 1)
            if self.even[k] and self._fixed[k].get("momentum") != 0:
                kept = {buffer: parts(rows[k]) for buffer, rows in self.kept.items()}
                self._bind(lane.state.optimizer.state, params, kept, self._steps[k])
        self.scale = None if bool((scale == 1).all()) else scale

    def _bind(
        self, state: Any, params: Sequence[nn.Parameter], rows: Mapping[str, Iterable[Tensor]], steps: Tensor
    ) -> None:
        """Copies the state into the rows, and makes the rows the state."""
        for p, step, *parts in zip(params, steps, *rows.values(), strict=True):
            for buffer, part in zip(rows, parts, strict=True):
                if buffer in state[p]:
                    part.copy_(state[p][buffer])
                state[p][buffer] = part
            if "exp_avg_sq" in rows:
                step.fill_(float(state[p].get("step", 0.0)))
                state[p]["step"] = step

    @torch.no_grad()
    def step(self, lrs: Mapping[int, float]) -> None:
        """Steps these lanes, by number and in order, at their learning rates."""
        rows = [*lrs]
        weights, gradient, decay, scale, kept = self.weights, self.gradient, self.decay, self.scale, self.kept
        for k in rows:
            self._count[k] += 1
        if whole := len(rows) == len(self.lanes):
            self._steps.add_(1)
        else:
            self._steps[rows] += 1
            weights, gradient, decay = weights[rows], gradient[rows], decay[rows]
            scale = None if scale is None else scale[rows]
            kept = {name: tensor[rows] for name, tensor in kept.items()}
        settings = [_numbers(self._fixed[k], lr, self._count[k]) for k, lr in lrs.items()]
        table = weights.new_tensor([[*numbers.values()] for numbers in settings])
        columns = dict(zip(settings[0], table.unsqueeze(2).unbind(1), strict=True))
        self._update(weights, gradient, decay, scale, kept, columns, self._fixed[0])
        if not whole:
            self.weights[rows] = weights
            for name, tensor in kept.items():
                self.kept[name][rows] = tensor


def _numbers(hyperparameters: Mapping[str, Any], lr: float, t: int) -> dict[str, float]:
    """Returns the numbers that update `t`, from 1, uses."""
    if "betas" not in hyperparameters:
        return {"lr": lr, "momentum": hyperparameters["momentum"]}
    beta1, beta2 = hyperparameters["betas"]
    numbers = {"lr": lr, "gain1": 1 - beta1, "gain2": 1 - beta2}
    if "eps" in hyperparameters:
        numbers |= {"rate": lr / (1 - beta1**t), "root": math.sqrt(1 - beta2**t), "eps": hyperparameters["eps"]}
    return numbers


def _scaled(update: Tensor, scale: Tensor | None) -> Tensor:
    return update if scale is None else update.mul_(scale)


def _shrink(w: Tensor, decay: Tensor, scale: Tensor | None, columns: Columns) -> None:
    """Applies decoupled weight decay: w <- (1 - lr decay) w."""
    w.mul_(1 - _scaled(decay * columns["lr"], scale))


def _sgd(
    w: Tensor, g: Tensor, decay: Tensor, scale: Tensor | None, kept: Any, columns: Columns, given: Mapping[str, Any]
) -> None:
    g = g + decay * w
    velocity = kept["momentum_buffer"].mul_(columns["momentum"]).add_(g)
    update = g.add_(velocity * columns["momentum"]) if given["nesterov"] else velocity
    w.sub_(_scaled(update * columns["lr"], scale))


def _adam_step(w: Tensor, g: Tensor, scale: Tensor | None, kept: Any, columns: Columns) -> None:
    kept["exp_avg"].lerp_(g, columns["gain1"])
    kept["exp_avg_sq"].lerp_(g * g, columns["gain2"])
    root = kept["exp_avg_sq"].sqrt().div_(columns["root"]).add_(columns["eps"])
    w.sub_(_scaled((kept["exp_avg"] / root).mul_(columns["rate"]), scale))


def _adam(
    w: Tensor, g: Tensor, decay: Tensor, scale: Tensor | None, kept: Any, columns: Columns, given: Mapping[str, Any]
) -> None:
    _adam_step(w, g + decay * w, scale, kept, columns)


def _adamw(
    w: Tensor, g: Tensor, decay: Tensor, scale: Tensor | None, kept: Any, columns: Columns, given: Mapping[str, Any]
) -> None:
    _shrink(w, decay, scale, columns)
    _adam_step(w, g, scale, kept, columns)


def _lion(
    w: Tensor, g: Tensor, decay: Tensor, scale: Tensor | None, kept: Any, columns: Columns, given: Mapping[str, Any]
) -> None:
    update = torch.lerp(kept["exp_avg"], g, columns["gain1"]).sign_()
    _shrink(w, decay, scale, columns)
    w.sub_(_scaled(update.mul_(columns["lr"]), scale))
    kept["exp_avg"].lerp_(g, columns["gain2"])


# train.optim.name -> its update, and its buffers by the names in its optimizer's state
RULES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "sgd": (_sgd, ("momentum_buffer",)),
    "adam": (_adam, ("exp_avg", "exp_avg_sq")),
    "adamw": (_adamw, ("exp_avg", "exp_avg_sq")),
    "lion": (_lion, ("exp_avg",)),
}
