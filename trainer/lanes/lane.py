"""A lane: a fit whose gradients are computed together with those of others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trainer.checkpoint.store import CheckpointStore
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

Stream = tuple[int, int, int]  # lanes for which it is equal read the same batches


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


class Lane(Fit):
    """`pending` is what it has reported and has no verdict on: until it has, it does not train."""

    def __init__(
        self, task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore, device: torch.device
    ) -> None:
        super().__init__(task, config, reporter, checkpoints, device, Solo())
        self.pending: Report | None = self._resume()
        self.checked = False  # whether its gradient among others has been found to be its own
        c, g = self.config.clip, self.config.gradients
        self._plain = not (
            g.centralize or g.normalize != "none" or g.noise is not None or c.per_parameter or c.adaptive
        )

    @property
    def stream(self) -> Stream:
        return self.config.seed, self.config.num_epochs, self.state.epoch

    def windows(self) -> Iterator[list[Any]]:
        """Those that are left of its epoch."""
        return self.loader.epoch(self.state.epoch, self.state.position)

    def check_batches(self, batches: list[Any]) -> None:
        """Raise ConfigError where it would read others in this window than these, of another lane of its stream."""
        (own, form), (others, its) = map(tree_flatten, (next(self.windows()), batches))
        if form != its or not all(map(_same, own, others)):
            raise ConfigError(NOT_ITS_DATA)

    def enter(self) -> None:
        """Before the first window that it trains on in an epoch."""
        self.state.model.train()
        self.state.report = None
        self.pace.enter(self.state.position)

    def seed(self, micro_step: int) -> int:
        """Of what is drawn for its next micro-batch."""
        return derive(self.config.seed, "step", self.state.step, micro_step)

    def gradient_alone(self, batches: list[Any], other: Task) -> Tensor:
        """The gradient of the summed loss over a window as the trial on its own has it, [parameters]. Raises
        ConfigError where the loss draws what lanes cannot, and where the task of the `other` lane, which is called in
        place of this one's, does not compute the same to the bit under this configuration."""
        own = self._gradient_by(self.task, batches)
        if other is not self.task:
            config, other.config = other.config, self.task.config
            try:
                if not own.equal(theirs := self._gradient_by(other, batches)) and bool(theirs.isfinite().all()):
                    raise ConfigError(NOT_ITS_OWN)
            finally:
                other.config = config
        return own

    def _gradient_by(self, task: Task, batches: list[Any]) -> Tensor:
        self.stepper.task, before = task, self.stepper.task
        try:
            return self._gradient(task, batches)
        finally:
            self.stepper.task = before

    def _gradient(self, task: Task, batches: list[Any]) -> Tensor:
        s, total = self.state, torch.zeros(())
        params = [p for p in s.model.parameters() if p.requires_grad]
        task.progress, task.step = s.step / self.total, s.step
        with buffers_held(s.model):
            for i, batch in enumerate(batches):
                seed_all(self.seed(i))
                before = _elsewhere()
                with Lanewise([self.seed(i)], self.device):
                    loss = self.stepper.task_loss(to_device(batch, self.device))
                if _elsewhere() != before:
                    raise ConfigError(
                        f"train.lanes: {method(self.task, 'loss')} draws from the generator of numpy or of python, of "
                        "which lanes have one for all: draw in augment, or set train.lanes=1."
                    )
                found = torch.autograd.grad(loss.sum, params, allow_unused=True, materialize_grads=True)
                total = total.to(self.device) + torch.cat([g.reshape(-1) for g in found])
        return total

    def factor(self, count: float, norm: float) -> float:
        """What the gradient of the sum is multiplied by: division and clipping by norm, where no other rule stands
        between them."""
        limit = self.config.clip.norm
        if not self._plain or not count:
            return 1.0
        return (1.0 if limit is None else min(limit / (norm / count + 1e-6), 1.0)) / count

    def trains_on(self, window: Window, norm: float) -> bool:
        """Whether the gradient that its parameters have, of which `norm` is that of the sum, is to be stepped by."""
        norm = self._ruled(window, norm)
        self.state.meter.add(self.state.step, window, norm)
        if trained := self.stepper.drain():
            return trained
        self.stepper.statistics.restore()
        return False

    def update(self, lr: float, *, alone: bool) -> None:
        """Step at this rate, unless its row was stepped with the others, and let the averages follow."""
        s = self.state
        if alone:
            for group in s.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            s.optimizer.step()
        if s.lookahead is not None:
            s.lookahead.step()
        s.average.update(s.step + 1)

    def advance(self, batches: list[Any]) -> Outcome | None:
        """A window is done; an Outcome if the trial ends by it."""
        s = self.state
        s.step, s.position = s.step + 1, s.position + 1
        if s.meter.gave_up:
            return self._give_up(batches)
        every = self.config.checkpoint.every_steps
        if every and s.step % every == 0 and s.position < s.windows:
            return self._tell(self._ready({}, save=True))
        return None

    def _ruled(self, window: Window, norm: float) -> float:
        """The norm of the mean gradient, which has been made what the optimizer is to see."""
        if not self._plain:
            return float(self.stepper.rules.apply(window, self.state.step, wait=True))
        if (limit := self.config.clip.value) is not None:
            clip_value_([p.grad for p in self.stepper.params if p.grad is not None], limit)
        return norm / float(window.count) if window.count else math.nan

    def read(self) -> None:
        """The windows of the epoch are over."""
        self.stepper.drain()
        self.pace.stop()

    def close_epoch(self) -> None:
        self.pending = self._close_epoch()

    def answered(self, verdict: Verdict) -> Outcome | None:
        """Obey; an Outcome if the trial ends here."""
        report, self.pending = self.pending, None
        assert report is not None
        return self._answered(report, verdict) or (self.finish() if self.done else None)

    def finish(self) -> Outcome:
        return self._finished()

    def asked_to_leave(self) -> Outcome | None:
        """Its Outcome where it is to leave now."""
        return self.leave() if self.reporter.preempted else None

    def leave(self) -> Outcome:
        """Give the trial up, so that another attempt goes on from here."""
        return self._leave("preempted")

    def close(self) -> None:
        self.loader.close()
        self.saver.close()


def _same(one: Any, other: Any) -> bool:
    """Whether two leaves of batches hold the same; what is neither tensor nor number nor text is taken to."""
    if type(one) is not type(other) or getattr(one, "shape", ()) != getattr(other, "shape", ()):
        return False
    if not isinstance(one, _VALUES):
        return True
    return bool(torch.as_tensor((one == other) | ((one != one) & (other != other))).all())  # NaN is NaN


def _elsewhere() -> tuple[Any, ...]:
    """Where the global generators of python and numpy stand."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]
