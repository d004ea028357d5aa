"""Takes one optimizer step: from a window of micro-batches to changed weights."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.data.device_copies import DeviceCopies
from trainer.data.loader import Filler
from trainer.errors import TrainerError
from trainer.gradients.accumulate import NoiseProbe, accumulate
from trainer.gradients.clip import GradientRules
from trainer.gradients.conflicts import Order
from trainer.gradients.freeze import Freeze
from trainer.gradients.nonfinite import Flags, skips_on_device
from trainer.gradients.parts import by_parts
from trainer.gradients.penalty import differentiable, penalised
from trainer.model.offload import Offload
from trainer.model.precision import autocast, underflow
from trainer.model.running_statistics import RunningStatistics
from trainer.optim.sam import Sam
from trainer.optim.schedule import momentum, set_momentum
from trainer.optim.sophia import Sophia
from trainer.optim.unwrapped_step import unmarked
from trainer.ranks import Solo
from trainer.runtime.seeding import derive, seed_all
from trainer.runtime.window import Window
from trainer.state import TrainState
from trainer.task import Loss, Task, checked

Jump = tuple[float, float]  # the loss of a window that jumped, and the norm of its gradient


class Stepper:
    """Takes the steps of `state`; the whole training has `total`."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        device: torch.device,
        ranks: Solo,
        state: TrainState,
        total: int,
        on_event: Callable[..., None],
    ) -> None:
        self.task, self.config, self.device, self.ranks = task, config, device, ranks
        self.state, self.total, self.on_event = state, total, on_event
        self.momentum_at = momentum(config.schedule, total, state.epochs)
        self.module = ranks.module(state.model if state.compiled is None else state.compiled.module)
        self.params = [p for group in state.optimizer.param_groups for p in group["params"]]
        self.rules = GradientRules(state.model, self.params, config, ranks)
        self.freeze = Freeze(state.model, self.params, config.freeze, total)
        self.probe = NoiseProbe(self.params) if config.gradients.noise_scale else None
        self.sam = Sam(self.params, config.optim.sam, ranks.norm) if config.optim.wrap == "sam" else None
        self.statistics = RunningStatistics(state.model)
        self.offloaded = Offload(config.activations, device)
        needs_numbers = state.lookahead is not None or state.balance is not None or config.rollback.enabled
        self.deferred = skips_on_device(state.optimizer, device) and not needs_numbers and not ranks.sharded
        self.flags = Flags(device)
        self.to_device = DeviceCopies(device)
        self.updating = False  # while weights change: an error then cannot be retried
        self._step = unmarked(state.optimizer)

    def take(self, batches: list[Any], lr: float) -> Jump | None:
        """Takes one optimizer step. Returns the loss and the norm if the loss has jumped, in which case it takes none.

        It also takes none if the loss or the gradient is not finite, or there is nothing to learn from.
        """
        s = self.state
        for group in s.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            if self.momentum_at is not None:
                set_momentum(group, self.momentum_at(s.step))
        self.statistics.remember()
        window, norm = self._gradient(batches)
        if self.config.rollback.enabled and s.spikes.is_spike(loss := _mean(window)):
            self.statistics.restore()
            return loss, float(norm)
        s.meter.add(s.step, window, norm)
        self.updating = True
        if self.deferred:
            self._update_on_device(window, norm)
        else:
            self._update(window, norm)
        self.updating = False
        return None

    def _update(self, window: Window, norm: float | Tensor) -> None:
        s, trained = self.state, self.drain()
        if s.loss_scale is not None and float(window.count):
            s.loss_scale.update(torch.tensor(trained, device=self.device))
        if not trained:
            return self.statistics.restore()
        self._step()
        if s.lookahead is not None:
            s.lookahead.step()
        if s.balance is not None:
            s.balance.step()
        s.average.update(s.step + 1)
        if self.config.rollback.enabled:
            s.spikes.add(_mean(window), float(norm))
        return None

    def _update_on_device(self, window: Window, norm: float | Tensor) -> None:
        """Updates the weights without waiting for the device: its fused optimizer obeys the flag."""
        s, bad = self.state, self.flags.of(norm, window.loss)
        if s.loss_scale is not None:
            s.loss_scale.update(bad == 0)
        s.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self._step()
        self.statistics.restore_where(bad)
        s.average.update(s.step + 1, bad)
        if (s.step + 1) % self.config.guard.max_consecutive == 0:
            self.drain()

    def _gradient(self, batches: list[Any]) -> tuple[Window, float | Tensor]:
        """Returns the window, its gradient divided and all rules applied in place, and the norm after the division.

        SAM and Sophia add passes over the same window with the same seeds, so with the same dropout. The window's loss
        is that of the first pass; a norm that is not finite in any of them skips the step.
        """
        s = self.state
        window = self.passes(batches, self.probe)
        if self.sam is not None:
            with self.statistics.held(), self.sam.perturbed():
                self.passes(batches)
        lost = None if s.loss_scale is None else underflow([p.grad for p in self.params if p.grad is not None])
        norm = self.rules.apply(window, s.step, wait=not self.deferred)
        if isinstance(s.optimizer, Sophia):
            norm = norm + 0.0 * self._curvature(s.optimizer, batches, window)  # adds 0 or NaN
        if s.loss_scale is not None and lost is not None:
            window = replace(window.times(1 / self._scale), answered=s.loss_scale.answers)
            window.terms["underflow"] = lost * window.count
        return window, norm

    def _curvature(self, optimizer: Sophia, batches: list[Any], window: Window) -> float | Tensor:
        """Lets the optimizer observe the curvature if that is due; returns the norm of the estimate."""
        optimizer.forget()
        if not optimizer.due(self.state.step):
            return 0.0
        with self.statistics.held(), self.ranks.backward(last=False):
            losses = (self.loss(i, batch) for i, batch in enumerate(batches))
            seed = derive(self.config.seed, "curvature", self.state.step)
            return optimizer.observe(losses, window.count, seed, self.ranks.add_up)

    def passes(self, batches: list[Any], probe: NoiseProbe | None = None) -> Window:
        """Runs a forward and a backward pass of each micro-batch; returns their totals over all ranks."""
        for p in self.params:  # Optimizer.zero_grad, without the profiler's mark
            p.grad = None
        window = self._differentiated(batches, probe)
        self.freeze.apply(self.state.step)
        return window

    def _differentiated(self, batches: list[Any], probe: NoiseProbe | None) -> Window:
        if self.config.gradients.by_parts:
            return by_parts(batches, self.loss, self.params, balance=self.state.balance, order=self._order())
        with differentiable(self.config.gradients):
            window = accumulate(batches, self.loss, probe, self.ranks)
        if any(p.grad is not None and p.grad.is_sparse for p in self.params):
            raise self._sparse()
        return self.ranks.total(window, self.params)

    def _order(self) -> Order | None:
        """Returns a function that draws orders of a number of parts, the same in each pass of a step."""
        if self.config.gradients.conflicts == "none":
            return None
        generator = torch.Generator().manual_seed(derive(self.config.seed, "conflicts", self.state.step))
        return lambda count: torch.randperm(count, generator=generator).tolist()

    def _sparse(self) -> TrainerError:
        names = (name for name, p in self.state.model.named_parameters() if p.grad is not None and p.grad.is_sparse)
        return TrainerError(
            f"the gradient of parameter {next(names)} is sparse, and steps and clipping take dense ones: leave "
            "sparse=True out where its embedding is computed."
        )

    @property
    def _scale(self) -> Tensor:
        """Returns the factor of fp16's sums and counts: the one that a mean over a whole batch would have."""
        assert self.state.loss_scale is not None
        return self.state.loss_scale.factor / self.config.batch_size_at(self.state.epoch)

    def loss(self, micro_step: int, batch: Any) -> Loss:
        """Returns the loss of one micro-batch that is differentiated."""
        if self.state.compiled is not None:
            self.state.compiled.begin(micro_step, self.params)
        seed_all(derive(self.config.seed, "step", self.state.step, micro_step, *self.ranks.stream))
        batch = self.to_device(batch)
        self.task.progress, self.task.step = self.state.step / self.total, self.state.step
        filler = isinstance(batch, Filler)
        samples = batch.batch if filler else batch
        self.task.filler = filler
        with differentiable(self.config.gradients):
            loss = penalised(self.config.gradients, self.state.model, lambda: self.task_loss(self.task, samples))
        self.task.filler = False
        loss = loss.times(0) if filler else loss
        return loss if self.state.loss_scale is None else loss.times(self._scale)

    def task_loss(self, task: Task, batch: Any) -> Loss:
        """Returns the checked loss of `task` for a batch on the device."""
        with autocast(self.config.precision, self.device), self.offloaded():
            loss = task.loss(self.module, batch)
        loss = checked(task, loss)
        if loss.sum.dtype in (torch.bfloat16, torch.float16):
            raise TrainerError(
                f"Task.loss has summed up in {str(loss.sum.dtype)[6:]}, which rounds: take the model's output as "
                "output.float() before the loss."
            )
        return loss

    def drain(self) -> bool:
        """Reads the meter; returns True if the last window was trained on.

        The first of bad windows in a row is an event.
        """
        meter = self.state.meter
        trained = meter.drain()
        for step in meter.turned_bad:
            self.on_event("skipped_step", step=step, reason="loss or gradient is not finite")
        meter.turned_bad.clear()
        return trained[-1] if trained else True


def _mean(window: Window) -> float:
    return float(window.loss) / (float(window.count) or 1.0)
