"""The training loop. Torch's names, no framework: read `fit`, then `_Fit` from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer import optim
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.store import load
from trainer.config import TrainConfig
from trainer.data import Loader
from trainer.data.loader import Filler, to_device
from trainer.diagnose import first_nonfinite
from trainer.errors import CheckpointError, ConfigError
from trainer.gradient_rules import GradientRules
from trainer.gradients import NoiseProbe, Window, accumulate
from trainer.guard import RunningStatistics, skips_on_device
from trainer.meter import Meter
from trainer.monitor import EarlyStopping, read
from trainer.optim.lookahead import Lookahead
from trainer.optim.sam import Sam
from trainer.optim.sophia import Sophia
from trainer.parallel import Solo, join
from trainer.report import CONTINUE, CheckpointRef, Outcome, OutcomeKind, Reporter, Verdict
from trainer.runtime import autocast, out_of_memory, runtime
from trainer.schedule import Plateau, scaled_lr, schedule
from trainer.seeding import derive, seed_all
from trainer.state import TrainState
from trainer.task import Loss, Task


def fit(task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore) -> Outcome:
    """Train `task` as `config` says, from its newest usable checkpoint on, and tell how it ended.

    Every report, and the verdict on it, is a function of the configuration, the task and the machine's kind alone:
    an interrupted run that is resumed reports what an uninterrupted one does. Raises ConfigError, DataError and
    CheckpointError for what a user can mend, Fenced from the reporter, and whatever the task's own code raises.
    """
    run = None
    with runtime(config) as device:
        try:
            run = _Fit(task, config, reporter, checkpoints, device, join(config.parallel, device))
            return run.run()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            sentence = f"out of memory: {str(error).splitlines()[0] if str(error) else 'no message'}"
            return run.ended("out_of_memory", sentence) if run else Outcome("out_of_memory", error=sentence)
        finally:
            if run is not None:
                run.loader.close()


class _Fit:
    """One call of `fit`. A window is what one optimizer step trains on; `state.step` counts windows."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        reporter: Reporter,
        checkpoints: CheckpointStore,
        device: torch.device,
        ranks: Solo,
    ) -> None:
        self.task, self.config, self.device, self.ranks = task, config, device, ranks
        self.reporter, self.checkpoints = ranks.lead(reporter, checkpoints)
        seed_all(derive(config.seed, "init"))
        model = ranks.prepare(task.model().to(device))
        seed_all(derive(config.seed, "data"))
        self.loader = Loader(task, config, device, ranks.share, ranks.shares, self.reporter.event)
        lr = scaled_lr(config.schedule, optim.learning_rate(config.optim), config.batch_size)
        self.total = config.num_epochs * self.loader.windows
        self.lr_at = schedule(config.schedule, lr, self.total, self.loader.windows)
        self.state = TrainState(
            model=model,
            optimizer=ranks.optimizer(config.optim, model),
            plateau=Plateau(config.schedule.plateau, lr),
            early_stopping=EarlyStopping(config.early_stopping),
            meter=Meter(config.clip, config.guard),
            windows=self.loader.windows,
            parallel=config.parallel.shape(),
        )
        self.module = ranks.module(model)
        self.params = [p for group in self.state.optimizer.param_groups for p in group["params"]]
        self.rules = GradientRules(model, self.params, config, ranks)
        self.probe = NoiseProbe(self.params) if config.gradients.noise_scale else None
        if k := config.optim.lookahead_k:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            self.state.lookahead = Lookahead(trained, k, config.optim.lookahead.alpha)
        self.sam = Sam(self.params, config.optim.sam, ranks) if config.optim.wrap == "sam" else None
        self.statistics = RunningStatistics(model)
        self.deferred = skips_on_device(self.state.optimizer, device) and self.state.lookahead is None
        self.committed_step = 0  # of the newest checkpoint a resumed run would start from
        self.entered = 0, time.perf_counter()  # the running epoch: at which position, and when

    def run(self) -> Outcome:
        verdict = self._resume()
        self.ranks.warm_up(self.state.model, lambda: self._loss(0, self.loader.first()))
        ended = self._obey(verdict)
        while not ended and not self.done:
            ended = self._train_epoch() or self._close_epoch()
        return ended or self.ended("complete")

    @property
    def done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.state.epoch >= self.config.num_epochs or self.state.early_stopping.stopped

    def _resume(self) -> Verdict:
        """Continue from the newest committed checkpoint, and make its report again for the verdict it was given.

        Where none of those committed is usable, training anew reports the same as the first time.
        """
        s, found = self.state, self.checkpoints.load_latest()
        for damage in self.checkpoints.damaged:
            at = {"path": str(damage.path), "step": damage.ref.step}
            self.reporter.event("checkpoint_damaged", **at, reason=damage.reason)
        if self.checkpoints.damaged and found is None:
            self.reporter.event("restarted_from_scratch", reason="no committed checkpoint is usable")
        self.checkpoints.sweep()
        if found is None:
            self._start_from(self.config)
            return CONTINUE
        state, ref = found
        s.load_state_dict(state)
        if s.loaded_parallel not in (None, s.parallel):  # from here on it is not what it would have been, to the bit
            self.reporter.event("ranks_changed", step=s.step, before=s.loaded_parallel, now=s.parallel)
        self.committed_step = s.step
        self.checkpoints.tidy(self.config.checkpoint)
        if s.report is None or not self.checkpoints.owns(ref):
            return CONTINUE
        return self.reporter.report(s.step, s.report["metrics"], epoch=s.report["epoch"])

    def _start_from(self, config: TrainConfig) -> None:
        """Start from the checkpoint a user names: its weights, optimizer, step and epoch."""
        if config.resume_from is None:
            return
        try:
            self.state.load_state_dict(load(config.resume_from))
        except CheckpointError as error:
            raise ConfigError(f"train.resume_from: {error}") from error
        if self.state.epoch >= config.num_epochs:
            raise ConfigError(
                f"train.resume_from ({config.resume_from}) has {self.state.epoch} epochs behind it and "
                f"train.num_epochs is {config.num_epochs}: raise num_epochs."
            )

    def _train_epoch(self) -> Outcome | None:
        """Train on the rest of the epoch; an Outcome if the fit ends before it does."""
        s, every = self.state, self.config.checkpoint.every_steps
        s.model.train()
        s.report = None
        self.entered = s.position, time.perf_counter()
        for batches in self.loader.epoch(s.epoch, s.position):
            if self.ranks.leaving(self.reporter):
                return self._leave("preempted")
            self._train_window(batches)
            if s.meter.gave_up:
                return self._give_up(batches)
            if every and s.step % every == 0 and s.position < s.windows and (ended := self._report({}, save=True)):
                return ended
        return None

    def _train_window(self, batches: list[Any]) -> None:
        """One optimizer step; none if the loss or the gradient is not finite, or there is nothing to learn from."""
        s = self.state
        for group in s.optimizer.param_groups:
            group["lr"] = self._lr(s.step) * group["lr_scale"]
        self.statistics.remember()
        window, norm = self._gradient(batches)
        s.meter.add(window, norm)
        if self.deferred:
            finite = torch.isfinite(torch.as_tensor(norm + window.loss))
            s.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            s.optimizer.step()
            self.statistics.restore_unless(finite)
            if (s.step + 1) % self.config.guard.max_consecutive == 0:
                self._drain()
        elif self._drain():
            s.optimizer.step()
            if s.lookahead is not None:
                s.lookahead.step()
        else:
            self.statistics.restore()
        s.step += 1
        s.position += 1

    def _gradient(self, batches: list[Any]) -> tuple[Window, float | Tensor]:
        """The window, with its gradient divided and all rules followed in place, and the norm after the division.

        What SAM and Sophia add are passes over the same window with the same seeds, so with the same dropout. The
        window's loss is that of the first pass; a norm that is not finite in any of them skips the step.
        """
        s = self.state
        window = self._passes(batches, self.probe)
        if self.sam is not None:
            with self.statistics.held(), self.sam.perturbed():
                self._passes(batches)
        norm = self.rules.apply(window, s.step, wait=not self.deferred)
        if isinstance(s.optimizer, Sophia) and s.optimizer.due(s.step):
            with self.statistics.held(), self.ranks.backward(last=False):
                losses = (self._loss(i, batch) for i, batch in enumerate(batches))
                seed = derive(self.config.seed, "curvature", s.step)
                curvature = s.optimizer.observe(losses, window.count, seed, self.ranks)
            norm = norm + 0.0 * curvature  # nothing, or NaN
        return window, norm

    def _passes(self, batches: list[Any], probe: NoiseProbe | None = None) -> Window:
        """A forward and a backward pass of each micro-batch, and what they add up to over all ranks."""
        self.state.optimizer.zero_grad()
        return self.ranks.total(accumulate(batches, self._loss, probe, self.ranks), self.params)

    def _lr(self, step: int) -> float:
        """The learning rate of `step`, this one or the last."""
        return self.lr_at(step) * self.state.plateau.scale

    def _loss(self, micro_step: int, batch: Any) -> Loss:
        seed_all(derive(self.config.seed, "step", self.state.step, micro_step, *self.ranks.stream))
        batch = to_device(batch, self.device)
        self.task.progress = self.state.step / self.total
        with autocast(self.config, self.device):
            if isinstance(batch, Filler):
                return self.task.loss(self.module, batch.batch).weightless()
            return self.task.loss(self.module, batch)

    def _drain(self) -> bool:
        """Read the meter; whether the last window was trained on. The first of bad windows in a row is an event."""
        before = self.state.meter.consecutive
        trained = self.state.meter.drain()
        if self.state.meter.consecutive > 0 and before == 0:
            self.reporter.event("skipped_step", step=self.state.step, reason="loss or gradient is not finite")
        return trained[-1] if trained else True

    def _give_up(self, batches: list[Any]) -> Outcome:
        in_a_row = self.config.guard.max_consecutive
        culprit = first_nonfinite(self.state.model, lambda: self._loss(0, batches[0]))
        return self.ended("nonfinite", f"loss or gradient was not finite {in_a_row} steps in a row: {culprit}.")

    def _close_epoch(self) -> Outcome | None:
        """Evaluate, report and save; an Outcome if the fit ends here."""
        s, c = self.state, self.config
        self._drain()
        position, start = self.entered
        metrics = s.meter.metrics() | {
            "train/lr": self._lr(s.step - 1),
            "train/samples_per_sec": self.loader.samples(position) / (time.perf_counter() - start),
        }
        metrics |= self._evaluate()
        metrics["time/epoch_seconds"] = seconds = time.perf_counter() - start
        metrics["time/data_share"] = self.loader.waited / seconds  # of the epoch, spent waiting for the loader
        s.epoch, s.position = s.epoch + 1, 0
        s.meter.new_epoch()
        if c.schedule.name == "plateau":
            s.plateau.update(read(metrics, c.schedule.plateau.monitor, "schedule.plateau.monitor"))
        if c.early_stopping.monitor is not None:
            s.early_stopping.update(read(metrics, c.early_stopping.monitor, "early_stopping.monitor"))
        if c.checkpoint.monitor is not None:
            read(metrics, c.checkpoint.monitor, "checkpoint.monitor")
        s.report = {"epoch": s.epoch, "metrics": metrics}
        every, last = c.checkpoint.every_epochs, self.done
        return self._report(metrics, epoch=s.epoch, save=every is not None and (last or s.epoch % every == 0))

    def _evaluate(self) -> dict[str, float]:
        seed_all(derive(self.config.seed, "evaluate", self.state.step))
        self.task.progress = self.state.step / self.total
        self.state.model.eval()
        with torch.no_grad(), autocast(self.config, self.device):
            metrics = {name: float(value) for name, value in self.task.evaluate(self.state.model).items()}
        return self.ranks.agree(metrics)

    def _report(self, metrics: Mapping[str, float], *, epoch: int | None = None, save: bool) -> Outcome | None:
        """Report, with a checkpoint if one is to be saved, and obey; an Outcome if the fit ends here."""
        ref = self._save() if save else None
        verdict = self.reporter.report(self.state.step, metrics, epoch=epoch, checkpoint=ref)
        if ref is not None:
            self._committed(ref, metrics)
        return self._obey(verdict)

    def _save(self) -> CheckpointRef:
        self._drain()
        return self.checkpoints.save(self.state.state_dict(), step=self.state.step, epoch=self.state.epoch)

    def _committed(self, ref: CheckpointRef, metrics: Mapping[str, float]) -> None:
        self.committed_step = ref.step
        self.checkpoints.commit(ref, metrics, self.config.checkpoint)

    def _obey(self, verdict: Verdict) -> Outcome | None:
        if verdict.kind == "stop":
            return None if self.done else self.ended("pruned")  # nothing is cut short by a stop at the end
        if verdict.kind == "restart_from":
            return self.ended("restarted")
        return self._leave("paused") if verdict.kind == "pause" else None

    def _leave(self, kind: OutcomeKind) -> Outcome:
        """End so that another attempt goes on from exactly here: with a committed checkpoint of this step."""
        if self.committed_step != self.state.step:
            ref = self._save()
            self.reporter.report(self.state.step, {}, checkpoint=ref)
            self._committed(ref, {})
        return self.ended(kind)

    def ended(self, kind: OutcomeKind, error: str = "") -> Outcome:
        return Outcome(kind, step=self.state.step, epoch=self.state.epoch, error=error)
