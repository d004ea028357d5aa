"""Holds a lane: a fit that computes its gradients together with others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint.store import CheckpointStore
from trainer.compat.pytree import tree_flatten
from trainer.config import TrainConfig
from trainer.data.loader import to_device
from trainer.errors import ConfigError
from trainer.gradients.accumulate import clip_value_
from trainer.lanes.per_lane_ops import Lanewise
from trainer.loop import Fit
from trainer.model.batch_norm import buffers_held
from trainer.ranks import Solo
from trainer.report import Outcome, Report, Reporter, Verdict
from trainer.runtime.seeding import derive, seed_all
from trainer.runtime.window import Window
from trainer.task import Task, method

Stream = tuple[int, int, int]  # lanes with equal streams read the same batches


NOT_ITS_OWN = (
    "train.lanes: the gradient that this trial has among others is not its own: its loss or model depends on more than "
    "what may differ between lanes, in what its task keeps for example, which is another lane's; read it from "
    "self.config in loss, leave it out of the space, or set train.lanes=1."
)

NOT_ITS_DATA = (
    "train.lanes: the batches that this trial reads are not those of the lane that it would share them with: what "
    "train_set or augment of its task gives depends on what may differ between lanes; take that out of lane_fields, "
    "or set train.lanes=1."
)
_VALUES = (Tensor, np.ndarray, np.generic, str, bytes, bool, int, float, complex)


class Lane:
    """A trial's `fit`, which trains together with others.

    `pending` is a report that has no verdict yet: until it has one, the lane does not train.
    """

    def __init__(
        self, task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore, device: torch.device
    ) -> None:
        read_here = config.model_copy(update={"num_workers": "none"})  # rather than in a process for each lane
        self.fit = Fit(task, read_here, reporter, checkpoints, device, Solo())
        self.task, self.config, self.reporter = task, self.fit.config, reporter
        self.state, self.stepper = self.fit.state, self.fit.stepper
        self.pending: Report | None = self.fit.resume()
        self.checked = False  # True once its gradient among others was checked to be its own
        c, g = self.config.clip, self.config.gradients
        self._plain = not (
            g.centralize or g.normalize != "none" or g.noise is not None or c.per_parameter or c.adaptive
        )

    @property
    def stream(self) -> Stream:
        return self.config.seed, self.config.num_epochs, self.state.epoch

    def windows(self) -> Iterator[list[Any]]:
        """Yields the windows that are left of its epoch."""
        return self.fit.loader.epoch(self.state.epoch, self.state.position)

    def check_batches(self, batches: list[Any]) -> None:
        """Raises ConfigError if this lane reads other batches in this window than another lane of its stream."""
        (leaves, form), (others, other_form) = map(tree_flatten, (next(self.windows()), batches))
        if form != other_form or not all(map(_same, leaves, others)):
            raise ConfigError(NOT_ITS_DATA)

    def seed(self, micro_step: int) -> int:
        """Returns the seed of the draws for its next micro-batch."""
        return derive(self.config.seed, "step", self.state.step, micro_step)

    def gradient_alone(self, batches: list[Any], other: Task) -> Tensor:
        """Returns the gradient of the summed loss over a window, [parameters], computed as for a single trial.

        Raises ConfigError if the loss draws random numbers in a way that lanes cannot, or if the task of the `other`
        lane, which is called instead of this lane's, does not compute the same to the bit under this configuration.
        """
        gradient = self._gradient(self.task, batches)
        if other is not self.task:
            borrowed = copy(other)  # with the state that it keeps
            borrowed.config = self.task.config
            theirs = self._gradient(borrowed, batches)
            if not gradient.equal(theirs) and bool(theirs.isfinite().all()):
                raise ConfigError(NOT_ITS_OWN)
        return gradient

    def _gradient(self, task: Task, batches: list[Any]) -> Tensor:
        s, total, device = self.state, torch.zeros(()), self.fit.device
        params = [p for p in s.model.parameters() if p.requires_grad]
        task.progress, task.step = s.step / self.fit.total, s.step
        with buffers_held(s.model):
            for i, batch in enumerate(batches):
                seed_all(self.seed(i))
                before = _elsewhere()
                with Lanewise([self.seed(i)], device):
                    loss = self.stepper.task_loss(task, to_device(batch, device))
                if _elsewhere() != before:
                    raise ConfigError(
                        f"train.lanes: {method(self.task, 'loss')} draws from the generator of numpy or of python, of "
                        "which lanes have one for all: draw in augment, or set train.lanes=1."
                    )
                gradients = torch.autograd.grad(loss.sum, params, allow_unused=True, materialize_grads=True)
                total = total.to(device) + torch.cat([g.reshape(-1) for g in gradients])
        return total

    def factor(self, count: float, norm: float) -> float:
        """Returns the factor of the summed gradient: division and clipping by norm, if no other rule comes between."""
        limit = self.config.clip.norm
        if not self._plain or not count:
            return 1.0
        return (1.0 if limit is None else min(limit / (norm / count + 1e-6), 1.0)) / count

    def trains_on(self, window: Window, norm: float) -> bool:
        """Returns True if the step with the current gradient is taken; `norm` is that of the summed gradient."""
        norm = self._ruled(window, norm)
        self.state.meter.add(self.state.step, window, norm)
        if trained := self.stepper.drain():
            return trained
        self.stepper.statistics.restore()
        return False

    def update(self, lr: float, *, solo: bool) -> None:
        """Steps at this rate, unless its row was stepped with the others, and updates the averages."""
        s = self.state
        if solo:
            for group in s.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            s.optimizer.step()
        if s.lookahead is not None:
            s.lookahead.step()
        s.average.update(s.step + 1)

    def advance(self, batches: list[Any]) -> Outcome | None:
        """Counts a finished window; returns an Outcome if the trial ends by it."""
        s = self.state
        s.step, s.position = s.step + 1, s.position + 1
        if s.meter.gave_up:
            return self.fit.give_up(batches)
        return self.fit.save_within_epoch()

    def _ruled(self, window: Window, norm: float) -> float:
        """Applies the rules for the optimizer's gradient; returns the norm of the mean gradient."""
        if not self._plain:
            return float(self.stepper.rules.apply(window, self.state.step, wait=True))
        if (limit := self.config.clip.value) is not None:
            clip_value_([p.grad for p in self.stepper.params if p.grad is not None], limit)
        return norm / float(window.count) if window.count else math.nan

    def read(self) -> None:
        """Ends the epoch's windows."""
        self.stepper.drain()
        self.fit.pace.stop()

    def close_epoch(self) -> None:
        self.pending = self.fit.close_epoch()

    def answered(self, verdict: Verdict) -> Outcome | None:
        """Obeys the verdict on `pending`; returns an Outcome if the trial ends here."""
        report, self.pending = self.pending, None
        assert report is not None
        return self.fit.answered(report, verdict) or (self.fit.finished() if self.fit.done else None)

    def asked_to_leave(self) -> Outcome | None:
        """Returns the lane's Outcome if it must leave now."""
        return self.fit.leave("preempted") if self.reporter.preempted else None

    def close(self) -> None:
        self.fit.loader.close()
        self.fit.saver.close()


def _same(left: Any, right: Any) -> bool:
    """Returns True if two leaves of batches are equal; leaves other than tensors, numbers and text count as equal."""
    if type(left) is not type(right) or getattr(left, "shape", ()) != getattr(right, "shape", ()):
        return False
    if not isinstance(left, _VALUES):
        return True
    return bool(torch.as_tensor((left == right) | ((left != left) & (right != right))).all())  # NaN equals NaN


def _elsewhere() -> tuple[Any, ...]:
    """Returns the states of the global generators of python and numpy."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]
