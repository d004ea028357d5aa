"""Penalises the slope of a model's outputs or loss by its inputs: `train.gradients.penalty`.

    output  lambda * mean_i (|d f(x_i)/d x_i| - norm)^2, where f is the sum of the model's outputs: with one output,
            the WGAN-GP penalty (Gulrajani et al. 2017, arXiv 1704.00028, eq. 3); with norm 0 R1, whose gamma/2 is
            lambda (Mescheder et al. 2018, arXiv 1801.04406, eq. 9)
    loss    the same of sample i's own loss: with norm 0 double backpropagation (Drucker & LeCun 1992, IEEE Trans.
            Neural Networks 3(6))

A sample has one index in the first dimension of the model's inputs. One backward pass of the sum gives the slopes of
single samples, which is right as long as no layer mixes samples, as batch norm does.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.compat.pytree import tree_leaves, tree_map
from trainer.config import GradientConfig
from trainer.errors import ConfigError
from trainer.losses.combine import gradient_penalty, over
from trainer.runtime.second_order import twice
from trainer.task import Loss


def differentiable(config: GradientConfig) -> AbstractContextManager[None]:
    """Returns the context of passes whose gradients are penalised, and so differentiated twice.

    Without a penalty it is a null context.
    """
    return nullcontext() if config.penalty is None else twice("gradients.penalty", "leave it out")


class _Call(NamedTuple):
    """One call of the model: its floating point inputs, which require a gradient, and its outputs that have one."""

    inputs: list[Tensor]
    outputs: list[Tensor]


def penalised(config: GradientConfig, model: nn.Module, loss_of: Callable[[], Loss]) -> Loss:
    """Returns the loss of a micro-batch, with `config.penalty` times the mean penalty added to its mean.

    `loss_of` calls `model`; if it does so more than once, the samples of all calls count. Term: `gradient_penalty`,
    before the weight. Raises ConfigError if the model gets no differentiable input.
    """
    if config.penalty is None:
        return loss_of()
    with _recorded(model) as calls:
        loss = loss_of()
    if not loss.sum.requires_grad:
        return loss
    parts = [_penalty(config, call, loss) for call in calls if call.outputs]
    if not any(call.inputs for call in calls) or not parts:
        raise ConfigError(
            "train.gradients.penalty needs floating point tensors among the arguments of the model's forward(), and it "
            "gets none: leave it out."
        )
    whole = Loss(torch.stack([part.sum for part in parts]).sum(), sum(part.count for part in parts))
    penalty = over(loss.count, whole)
    weighted = loss.sum + config.penalty * penalty
    return Loss(weighted, loss.count, {**loss.terms, "gradient_penalty": penalty.detach()})


def _penalty(config: GradientConfig, call: _Call, loss: Loss) -> Loss:
    penalised = (
        loss.sum if config.penalty_of == "loss" else torch.stack([output.float().sum() for output in call.outputs])
    )
    return gradient_penalty(penalised, call.inputs, norm=config.penalty_norm)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[_Call]]:
    """Yields the list of calls of `model` within the block."""
    calls: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        calls.append(_Call([], []))
        return tree_map(entered, (args, kwargs))

    def entered(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled()):
            return value
        value = value if value.requires_grad else value.detach().requires_grad_()
        calls[-1].inputs.append(value)
        return value

    def after(module: nn.Module, args: Any, output: Any) -> None:
        calls[-1].outputs.extend(x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad)

    handles = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
