"""Holds the training loop in torch's terms, without a framework: read `fit`, then `Fit` from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.config.idle import unread
from trainer.config.optim import OPTIMIZERS
from trainer.data import Loader
from trainer.distributed.join import join
from trainer.errors import CheckpointError, ConfigError, OutOfMemory
from trainer.gradients.balance import balance_of
from trainer.gradients.find_nonfinite import first_nonfinite
from trainer.gradients.loss_spikes import RECENT, Spikes, as_json, loudest
from trainer.memory.bound import memory_plan
from trainer.metrics.meter import Meter
from trainer.metrics.monitor import EarlyStopping
from trainer.metrics.throughput import Pace
from trainer.model.attributes import Attributes
from trainer.model.batch_norm import check_passes, least_pass
from trainer.model.build import made
from trainer.model.compiled import Compiled, records_graphs, without_graphs
from trainer.model.precision import LossScale, autocast, resolved
from trainer.optim import build as optim
from trainer.optim.lookahead import lookahead
from trainer.optim.schedule import Plateau, never_warm, scaled_lr, schedule
from trainer.optim.schedule_free import average_of
from trainer.ranks import Solo
from trainer.report import ENDS, Outcome, OutcomeKind, Report, Reporter, Verdict, hand_over
from trainer.runtime.device import out_of_memory
from trainer.runtime.seeding import derive, seed_all
from trainer.saves import Saves
from trainer.settings import runtime
from trainer.state import TrainState
from trainer.step import Stepper
from trainer.task import Task, measured


def fit(
    task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore, watch: Watch | None = None
) -> Outcome:
    """Trains `task` under `config`, from its newest usable checkpoint on, and returns the outcome.

    `watch`, such as a `trainer.metrics.progress.Display`, is called before the first step and after each, on rank 0.

    Every report, and the verdict on it, is a function of the configuration, the task and the kind of machine alone: an
    interrupted run that is resumed reports the same as an uninterrupted one. Raises ConfigError, DataError and
    CheckpointError for errors that a user can fix, Fenced from the reporter, and any error of the task's own code.
    """
    run = None
    with runtime(config) as device:
        try:
            run = Fit(task, config, reporter, checkpoints, device, join(config.parallel, device), watch)
            return run.run()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            sentence = f"out of memory: {str(error).splitlines()[0] if str(error) else 'no message'}"
            return run.ended("out_of_memory", sentence) if run else Outcome("out_of_memory", error=sentence)
        finally:
            if run is not None:
                run.loader.close()
                run.saver.close()


Watch = Callable[["Fit"], None]


class Fit:
    """One call of `fit`. A window is the data of one optimizer step; `state.step` counts windows."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        reporter: Reporter,
        checkpoints: CheckpointStore,
        device: torch.device,
        ranks: Solo,
        watch: Watch | None = None,
    ) -> None:
        config = resolved(config, device)
        self.task, self.config, self.device, self.ranks = task, config, device, ranks
        self.watch: Watch = watch if watch and ranks.first else lambda _: None
        self.reporter, self.checkpoints = ranks.lead(reporter, checkpoints)
        self.saver = self.checkpoints.saver
        model, self.parameters = made(task, config, device)
        model = ranks.prepare(model, task)
        seed_all(derive(config.seed, "data"))
        self.loader = Loader(task, config, device, ranks.share, ranks.shares, self.reporter.event, least_pass(model))
        check_passes(task, model, self.loader, config, device)
        lr = scaled_lr(config.schedule, optim.learning_rate(config.optim), config.batch_size)
        epochs = self.loader.sampler.epochs
        self.total = int(epochs.step(config.num_epochs))
        self.lr_at = schedule(config.schedule, lr, self.total, epochs)
        remarks = {"warmup_not_over": never_warm(config.schedule, self.total, epochs), "unread_options": unread(config)}
        remarks["compiled_without_graphs"] = without_graphs(config, device)
        for kind, sentence in remarks.items():
            if sentence:
                self.reporter.event(kind, step=0, reason=sentence)
        optimizer = ranks.optimizer(config.optim, model)
        self.state = TrainState(
            model=model,
            optimizer=optimizer,
            plateau=Plateau(config.schedule.plateau, lr),
            early_stopping=EarlyStopping(config.early_stopping),
            meter=Meter(config.clip, config.guard),
            average=average_of(config.average, model, optimizer, self.total),
            spikes=Spikes(config.rollback),
            loss_scale=LossScale(config.loss_scale, device) if config.precision == "fp16" else None,
            epochs=epochs,
            micro_batch_size=self.loader.sampler.micro_batch_size,
            keeper=ranks.keeper(optimizer),
            lookahead=lookahead(config.optim, model),
            balance=balance_of(config.gradients, model, optimizer),
            compiled=Compiled(model, self.reporter.event, records_graphs(config, device)) if config.compile else None,
            parallel=config.parallel.shape(),
            cycles_momentum=config.schedule.cycles_momentum,
        )
        self.stepper = Stepper(task, config, device, ranks, self.state, self.total, self.reporter.event)
        self.attributes = Attributes(model, None if config.optim.name in OPTIMIZERS else optimizer)
        self.memory_mb: float | None = None  # a step's memory by the estimate, if one was made
        self.saves = Saves(config, ranks, self.reporter, self.checkpoints, self.state)
        self.pace = Pace(task, config, device, self.loader, self.saver, self.state.meter)

    def run(self) -> Outcome:
        if refused := self._plan_memory():
            return refused
        verdict = self.resume()
        if (most := self.ranks.micro_batch_size) is not None and most < self.state.micro_batch_size:
            self._shrink_to(most)
        try:
            self.ranks.warm_up(self.state.model, lambda: self.stepper.loss(0, self.loader.first()))
        except (RuntimeError, MemoryError) as error:
            if not self._shrink(error):
                raise
        outcome = self.tell(verdict) if verdict else None
        self.watch(self)
        while not outcome and not self.done:
            outcome = self._train_epoch() or self.tell(self.close_epoch())
        self.saves.settle()
        return outcome or self.finished()

    def finished(self, kind: OutcomeKind = "complete") -> Outcome:
        why = self.state.early_stopping.diverged or self.state.meter.untrained
        return self.ended("nonfinite" if why else kind, why)

    @property
    def done(self) -> bool:
        """Returns True if there is nothing left to train."""
        return self.state.epoch >= self.config.num_epochs or self.state.early_stopping.stopped

    def _plan_memory(self) -> Outcome | None:
        """Chooses a micro-batch that fits if memory is bounded; returns an Outcome if none does."""
        sampler, arguments = self.loader.sampler, (self.loader.first, self.reporter.event, self.loader.sampler.halved)
        plan = memory_plan(self.task, self.config, self.device, self.ranks, sampler.micro_batch_size, *arguments)
        if plan is None:
            return None
        self.memory_mb = plan.requested.peak / 2**20
        if plan.fits is None or plan.refused:
            return self.ended("out_of_memory", plan.refusal())
        return self._set_micro_batch_size(plan.fits)

    def resume(self) -> Report | None:
        """Continues from the newest committed checkpoint. Returns its report, which is repeated to get its verdict.

        If no committed checkpoint is usable, training from the start reports the same as the first time.
        """
        s, loaded = self.state, self.checkpoints.load_latest()
        for damage in self.checkpoints.damaged:
            self.reporter.event("checkpoint_damaged", path=damage.shown, step=damage.ref.step, reason=damage.reason)
        if self.checkpoints.damaged and loaded is None:
            self.reporter.event("restarted_from_scratch", reason="no committed checkpoint is usable")
        self.checkpoints.sweep()
        if loaded is None:
            self._start_from(self.config)
            return None
        state, ref = loaded
        s.load_state_dict(self.ranks.part(state))
        self._set_micro_batch_size(s.micro_batch_size)
        if s.loaded_parallel not in (None, s.parallel):  # from here on results differ in the last bits
            self.reporter.event("ranks_changed", step=s.step, before=s.loaded_parallel, now=s.parallel)
        self.saves.tidy()
        if not self.checkpoints.owns(ref):
            s.meter.begin()
            return None
        self.attributes.told = True  # by an earlier attempt
        return None if s.report is None else Report(s.step, s.report["metrics"], s.report["epoch"])

    def _start_from(self, config: TrainConfig) -> None:
        """Starts from the checkpoint that the user names: its weights, optimizer, step and epoch."""
        if config.resume_from is None:
            return
        try:
            self.state.start_from(self.checkpoints.load(config.resume_from), self.ranks.part)
        except CheckpointError as error:
            raise ConfigError(f"train.resume_from: {error}") from error
        self.state.check_epochs_left(config)
        self.state.meter.begin()

    def _train_epoch(self) -> Outcome | None:
        """Trains on the rest of the epoch; returns an Outcome if the fit ends before it does."""
        self.enter_epoch()
        outcome, smaller = None, True
        while smaller:
            outcome, smaller = self._train_windows()
        return outcome

    def enter_epoch(self) -> None:
        """Prepares for the first window that the fit trains on in an epoch."""
        self.state.model.train()
        self.state.report = None
        self.pace.enter(self.state.position)

    def _train_windows(self) -> tuple[Outcome | None, bool]:
        """Returns (outcome or None, True to retry the epoch with a smaller micro-batch)."""
        s = self.state
        for batches in self.loader.epoch(s.epoch, s.position):
            if self.ranks.leaving(self.reporter):
                return self.leave("preempted"), False
            self.saves.look_after()
            try:
                outcome = self._train_window(batches)
            except (RuntimeError, MemoryError) as error:
                if not self._shrink(error):
                    raise
                return None, True
            if outcome or s.meter.gave_up:
                return outcome or self.give_up(batches), False
            if outcome := self.save_within_epoch():
                return outcome, False
        return None, False

    def save_within_epoch(self) -> Outcome | None:
        """Saves and reports if a checkpoint is due before the epoch ends; returns an Outcome if the fit ends here."""
        s, every = self.state, self.config.checkpoint.every_steps
        due = every and s.step % every == 0 and s.position < s.windows
        return self.tell(self.ready({}, save=True)) if due else None

    def _train_window(self, batches: list[Any]) -> Outcome | None:
        """Takes one optimizer step, or rolls back if the loss has jumped."""
        s = self.state
        jump = self.stepper.take(batches, self.lr(s.step))
        outcome = self._roll_back(batches, *jump) if jump else None
        s.step += 1
        s.position += 1
        self.watch(self)
        return outcome

    def _roll_back(self, batches: list[Any], loss: float, norm: float) -> Outcome | None:
        """Skips a window whose loss has jumped; weights and optimizer go back to the last scheduled save."""
        s, spikes = self.state, self.state.spikes
        report = {"step": s.step, "epoch": s.epoch, "window": s.position, "lr": self.lr(s.step)}
        report |= spikes.report(loss, norm)
        details = {"recent_losses": spikes.losses[-RECENT:], "largest_gradients": loudest(s.model, self.ranks)}
        details["samples"] = self.loader.sampler.indices(s.epoch, s.position)
        sentence, action = spikes.exhausted(loss), "the trial ends"
        if not sentence:
            action = self._restore_weights()
            spikes.rolled_back(s.step)
        file = f"anomalies/step-{s.step:08d}.json"
        hand_over(self.reporter, file, as_json(report | {"action": action} | details))
        self.reporter.event("loss_jumped", **report, action=action, report=file)
        return self.ended("nonfinite", sentence) if sentence else None

    def _restore_weights(self) -> str:
        """Loads weights and optimizer from the last scheduled checkpoint; returns a clause that says so."""
        self.saves.settle()
        spikes, loaded = self.state.spikes.config, self.checkpoints.load_scheduled(self.saves.scheduled)
        if loaded is not None:
            self.state.load_weights(self.ranks.part(loaded[0]))
        to = "the weights stay: no checkpoint exists yet" if loaded is None else f"back to step {loaded[1].step}"
        return f"window skipped, {to}, lr times {spikes.lr_factor:g} for {spikes.cooldown} steps"

    def _shrink(self, error: BaseException) -> bool:
        """Halves the micro-batch, if memory ran out before the weights had changed; returns False if that cannot help.

        The window stays the same, except for the loss's random draws. Several ranks, which may wait for this one, start
        again.
        """
        half = self.loader.sampler.halved(self.state.micro_batch_size)
        if not out_of_memory(error) or self.stepper.updating or half == self.state.micro_batch_size:
            return False
        if self.ranks.ranks > 1:
            raise OutOfMemory(str(error), half) from error
        self.stepper.statistics.restore()
        self.state.optimizer.zero_grad()
        self._shrink_to(half)
        return True

    def _shrink_to(self, size: int) -> None:
        self._set_micro_batch_size(size)
        self.reporter.event("out_of_memory", step=self.state.step, micro_batch_size=self.state.micro_batch_size)

    def _set_micro_batch_size(self, size: int) -> None:
        self.state.micro_batch_size = self.loader.sampler.micro_batch_size = size

    def lr(self, step: int) -> float:
        """Returns the learning rate of `step`, the current or the previous one."""
        factor = self.task.lr_scale(step / self.total)
        return self.lr_at(step) * factor * self.state.plateau.scale * self.state.spikes.lr_scale(step)

    def give_up(self, batches: list[Any]) -> Outcome:
        in_a_row = self.config.guard.max_consecutive
        culprit = first_nonfinite(self.state.model, lambda: self.stepper.passes(batches), self.ranks)
        return self.ended("nonfinite", f"loss or gradient was not finite {in_a_row} steps in a row: {culprit}.")

    def close_epoch(self) -> Report:
        """Evaluates and saves. Returns the report to make."""
        s, c = self.state, self.config
        self.stepper.drain()
        metrics = s.meter.metrics() | {"train/lr": self.lr(s.step - 1)} | self.pace.rates() | self._extras()
        metrics |= self._evaluate() | self.pace.times(self.ranks.everyone, metrics)
        s.epoch, s.position = s.epoch + 1, 0
        s.meter.new_epoch()
        s.watch(metrics, c)
        s.report = {"epoch": s.epoch, "metrics": metrics}
        every, last = c.checkpoint.every_epochs, self.done
        return self.ready(metrics, epoch=s.epoch, save=every is not None and (last or s.epoch % every == 0))

    def _extras(self) -> dict[str, float]:
        """Returns the model's size, and the metrics of optional features that are on."""
        s, extras = self.state, {"train/parameters": float(self.parameters)}
        if self.memory_mb is not None:
            extras["system/memory_estimate_mb"] = self.memory_mb
        if s.loss_scale is not None:
            extras["train/loss_scale"] = s.loss_scale.factor.item()
        if self.config.rollback.enabled:
            extras["train/rollbacks"] = float(s.spikes.rollbacks)
        return extras | self.ranks.communication()

    def _evaluate(self) -> dict[str, float]:
        seed_all(derive(self.config.seed, "evaluate", self.state.step))
        self.task.progress, self.task.step = self.state.step / self.total, self.state.step
        model = self.state.average.model.eval()
        with torch.no_grad(), autocast(self.config.precision, self.device):
            metrics = measured(self.task, model)
            for name, text in self.task.artifacts(model).items():
                hand_over(self.reporter, name, text)
        return self.ranks.agree(metrics)

    def ready(self, metrics: Mapping[str, float], *, epoch: int | None = None, save: bool) -> Report:
        """Returns a report, with a checkpoint if one is saved and waited for."""
        if save:
            self._save(metrics)
        return Report(self.state.step, metrics, epoch, self.saves.waited_for())

    def tell(self, r: Report) -> Outcome | None:
        """Reports and obeys the verdict; returns an Outcome if the fit ends here."""
        return self.answered(r, self.reporter.report(r))

    def answered(self, report: Report, verdict: Verdict) -> Outcome | None:
        """Obeys the verdict on a report; returns an Outcome if the fit ends here."""
        if report.checkpoint is not None:
            self.saves.commit(report.checkpoint)
        if verdict.kind == "restart_from":
            return self.ended("restarted")
        if verdict.kind == "continue" or self.done:  # nothing is cut short at the end
            return None
        return self.finished("pruned") if verdict.kind == "stop" else self.leave(ENDS[verdict.kind])

    def _save(self, metrics: Mapping[str, float]) -> None:
        self.saves.settle()
        self.stepper.drain()
        self.attributes.tell(self.reporter.event, self.state.step)
        self.saves.start(metrics)

    def leave(self, kind: OutcomeKind) -> Outcome:
        """Ends with a committed checkpoint of this step, so that another attempt continues from exactly here."""
        self.saves.settle()
        if self.saves.committed_step != self.state.step:
            self._save({})
            self.saves.settle()
        return self.ended(kind)

    def ended(self, kind: OutcomeKind, error: str = "") -> Outcome:
        return Outcome(kind, step=self.state.step, epoch=self.state.epoch, error=error)
