"""Defines the interface of the ranks that train a trial, implemented for a single process."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.saver import Alone
from trainer.checkpoint.store import CheckpointStore
from trainer.compat import foreach
from trainer.config import OptimConfig
from trainer.errors import TrainerError
from trainer.optim import build as optim
from trainer.report import Reporter
from trainer.task import Loss, Task

if TYPE_CHECKING:
    from trainer.runtime.window import Window

NO_GRADIENT = "Task.loss returned a sum without a gradient: compute it from the model's output."
_NOTHING: AbstractContextManager[object] = nullcontext()


class Solo(Alone):
    """The interface of the ranks to `trainer/loop.py`, implemented for a single process.

    Every rank calls every method at the same point of the loop.
    """

    ranks = 1
    shares = 1  # parts into which every batch is divided
    share = 0  # number of this rank's part
    stage = 0  # the pipeline's stage that this rank computes
    micro_batch_size: int | None = None  # an upper limit, if less than configured
    sharded = False  # True if a rank holds parts of parameters
    stream: tuple[int, ...] = ()  # counters that set this rank's random numbers apart

    def lead(self, reporter: Reporter, checkpoints: CheckpointStore) -> tuple[Reporter, CheckpointStore]:
        """Returns the reporter and the store through which all ranks act as one."""
        return reporter, checkpoints

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        """Returns the model as this rank holds it: whole, or its part of it."""
        return model

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        return optim.build(config, model)

    def keeper(self, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer that keeps this rank's optimizer state."""
        return optimizer

    def names(self, model: nn.Module) -> list[str]:
        """Returns the names of all parameters of the whole model."""
        return [name for name, _ in model.named_parameters()]

    def module(self, model: nn.Module) -> nn.Module:
        """Returns the module for `Task.loss`, which may be compiled.

        Calling it also sets up the gradients' reduction.
        """
        return model

    def rehearse(self, model: nn.Module) -> list[Tensor]:
        """Returns this rank's tensors besides model and optimizer; called instead of `module` if only memory counts."""
        return []

    def warm_up(self, model: nn.Module, loss: Callable[[], Loss]) -> None:
        """Runs the one-time set-up of a first backward pass, before the first step of every start, fresh or resumed."""

    def everyone(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        return [value]

    def earliest(self, found: tuple[tuple[int, ...], str]) -> tuple[tuple[int, ...], str]:
        """Returns the minimum over all ranks, with its rank if it is another's; ties go to the lowest rank."""
        return found

    def leaving(self, reporter: Reporter) -> bool:
        """Returns True if all ranks must leave now."""
        return reporter.preempted

    def backward(self, last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch's passes; the gradients are complete after a window's `last`."""
        return _NOTHING

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        """Runs a forward and a backward pass of each micro-batch; yields its loss if this rank knows it."""
        for i, batch in enumerate(batches):
            with self.backward(last=i == len(batches) - 1):
                loss = loss_of(i, batch)
                if loss.sum.requires_grad:
                    loss.sum.backward()
                elif float(loss.count) > 0 or self.ranks > 1:
                    raise TrainerError(NO_GRADIENT)
            yield loss

    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        """Returns the window's numbers over all ranks, and leaves in `params` the gradients of their sum."""
        return window

    def reduce(self, params: Sequence[nn.Parameter], count: float | Tensor) -> None:
        """Reduces the gradients, as a part of `total`, in a window of `count` samples."""

    def communication(self) -> dict[str, float]:
        """Returns the metric `time/communication_share`, if it is measured."""
        return {}

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all shares."""

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns this rank's parts of the tensors, which share their memory."""
        return tensors

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the norm of the whole model's gradient: `get_total_norm`, without grouping if all are of one kind."""
        if len({(g.device, g.dtype) for g in gradients}) != 1:
            return nn.utils.get_total_norm(gradients)
        return torch.linalg.vector_norm(torch.stack([*self.norms(gradients)]))

    def norms(self, gradients: Sequence[Tensor]) -> Iterable[Tensor]:
        """Returns the norm of each gradient."""
        return foreach.norm([*gradients])

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of this rank's state that it saves; not a collective call."""
        return state

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the same and, on rank 0, names for all that the others save: the state of a single process."""
        return self.own(state)

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of such a state."""
        return state

    def merged(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Returns the results of all ranks on their parts of the model, by name."""
        return mine


ALONE = Solo()


def values_of(model: nn.Module) -> list[Tensor]:
    """Returns copies of all buffers."""
    return [buffer.detach().clone() for buffer in model.buffers()]


@torch.no_grad()
def put_back(model: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)
