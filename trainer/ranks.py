"""The interface of the ranks that train a trial, as one process answers it."""

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
    """What `trainer/loop.py` asks of the ranks that train a trial, and the answers of a process that is alone.

    Every rank calls every method at the same point of the loop.
    """

    ranks = 1
    shares = 1  # into which every batch is divided
    share = 0  # the one that is this rank's
    stage = 0  # of a pipeline, the one that this rank is at
    micro_batch_size: int | None = None  # the largest that may be, if less than is configured
    sharded = False  # whether a rank holds parts of parameters
    stream: tuple[int, ...] = ()  # what tells this rank's random numbers from the others'

    def lead(self, reporter: Reporter, checkpoints: CheckpointStore) -> tuple[Reporter, CheckpointStore]:
        """The reporter and the store through which all ranks speak as one."""
        return reporter, checkpoints

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        """The model as this rank holds it: its own, or its part of it."""
        return model

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        return optim.build(config, model)

    def keeper(self, optimizer: Optimizer) -> Optimizer:
        """The one that keeps what this rank keeps of the optimizer's state."""
        return optimizer

    def names(self, model: nn.Module) -> list[str]:
        """Of all parameters of the whole model."""
        return [name for name, _ in model.named_parameters()]

    def module(self, model: nn.Module) -> nn.Module:
        """What `Task.loss` is given of the model, which may be compiled: calling it also arranges for the gradients'
        reduction."""
        return model

    def rehearse(self, model: nn.Module) -> list[Tensor]:
        """In place of `module`, where nothing but memory counts: what this rank keeps beside model and optimizer."""
        return []

    def warm_up(self, model: nn.Module, loss: Callable[[], Loss]) -> None:
        """Before the first step of every start, fresh or resumed: settle whatever a first backward pass settles."""

    def everyone(self, value: Any) -> list[Any]:
        """What each of all ranks gives."""
        return [value]

    def earliest(self, found: tuple[tuple[int, ...], str]) -> tuple[tuple[int, ...], str]:
        """The least of what all ranks have found, of equals the first rank's; with its rank, if it is another's."""
        return found

    def leaving(self, reporter: Reporter) -> bool:
        """Whether all ranks are to leave now."""
        return reporter.preempted

    def backward(self, last: bool) -> AbstractContextManager[object]:
        """Surrounds forward and backward of a micro-batch; the gradients are complete after a window's `last`."""
        return _NOTHING

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        """A forward and a backward pass of each micro-batch; its loss, where this rank knows it."""
        for i, batch in enumerate(batches):
            with self.backward(last=i == len(batches) - 1):
                loss = loss_of(i, batch)
                if loss.sum.requires_grad:
                    loss.sum.backward()
                elif float(loss.count) > 0 or self.ranks > 1:
                    raise TrainerError(NO_GRADIENT)
            yield loss

    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        """The window's numbers over all ranks, and in `params` the gradients of their sum."""
        return window

    def reduce(self, params: Sequence[nn.Parameter], count: float | Tensor) -> None:
        """Of `total`, what concerns the gradients, in a window of so many samples."""

    def communication(self) -> dict[str, float]:
        """The metric `time/communication_share`, where it is measured."""
        return {}

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all shares in place of each tensor."""

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's parts of them, which share their memory."""
        return tensors

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the whole model's gradient: `get_total_norm`, without its grouping where all is of one kind."""
        if len({(g.device, g.dtype) for g in gradients}) != 1:
            return nn.utils.get_total_norm(gradients)
        return torch.linalg.vector_norm(torch.stack([*self.norms(gradients)]))

    def norms(self, gradients: Sequence[Tensor]) -> Iterable[Tensor]:
        """The norm of each of them."""
        return torch._foreach_norm([*gradients])

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of this rank's state, what it saves; found without the others."""
        return state

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same, and on rank 0 a name for all that the others save: what one process would have."""
        return self.own(state)

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's of such a state."""
        return state

    def merged(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What every rank has found of the part of the model that it holds, by name, together."""
        return mine


ALONE = Solo()


def values_of(model: nn.Module) -> list[Tensor]:
    """Copies of all buffers."""
    return [buffer.detach().clone() for buffer in model.buffers()]


@torch.no_grad()
def put_back(model: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)
