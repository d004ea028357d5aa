"""The training loop. Torch's names, no framework: read `fit`, then `Fit` from top to bottom."""

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
from trainer.gradients.find_nonfinite import first_nonfinite
from trainer.gradients.loss_spikes import RECENT, Spikes, as_json, loudest
from trainer.memory.bound import memory_plan
from trainer.metrics.meter import Meter
from trainer.metrics.monitor import EarlyStopping
from trainer.metrics.throughput import Pace
from trainer.model.attributes import Attributes
from trainer.model.averaging import Average
from trainer.model.batch_norm import check_passes, least_pass
from trainer.model.compiled import Compiled
from trainer.model.made import made
from trainer.model.precision import LossScale, autocast, settled
from trainer.optim import build as optim
from trainer.optim.lookahead import lookahead
from trainer.optim.schedule import Plateau, never_warm, scaled_lr, schedule
from trainer.ranks import Solo
from trainer.report import ENDS, CheckpointRef, Outcome, OutcomeKind, Report, Reporter, Verdict, hand_over
from trainer.runtime.device import out_of_memory
from trainer.runtime.failpoint import failpoint
from trainer.runtime.seeding import derive, seed_all
from trainer.settings import runtime
from trainer.state import TrainState
from trainer.step import Stepper
from trainer.task import Task, measured


def fit(
    task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore, watch: Watch | None = None
) -> Outcome:
    """Train `task` as `config` says, from its newest usable checkpoint on, and tell how it ended. `watch`, a
    `trainer.metrics.progress.Display` say, is called before the first step and after each, on rank 0.

    Every report, and the verdict on it, is a function of the configuration, the task and the machine's kind alone:
    an interrupted run that is resumed reports what an uninterrupted one does. Raises ConfigError, DataError and
    CheckpointError for what a user can mend, Fenced from the reporter, and whatever the task's own code raises.
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
    """One call of `fit`. A window is what one optimizer step trains on; `state.step` counts windows."""

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
        config = settled(config, device)
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
        for kind, said in remarks.items():
            if said:
                self.reporter.event(kind, step=0, reason=said)
        optimizer = ranks.optimizer(config.optim, model)
        self.state = TrainState(
            model=model,
            optimizer=optimizer,
            plateau=Plateau(config.schedule.plateau, lr),
            early_stopping=EarlyStopping(config.early_stopping),
            meter=Meter(config.clip, config.guard),
            average=Average(config.average, model, self.total),
            spikes=Spikes(config.rollback),
            loss_scale=LossScale(config.loss_scale, device) if config.precision == "fp16" else None,
            epochs=epochs,
            micro_batch_size=self.loader.sampler.micro_batch_size,
            keeper=ranks.keeper(optimizer),
            lookahead=lookahead(config.optim, model),
            compiled=Compiled(model, self.reporter.event) if config.compile else None,
            parallel=config.parallel.shape(),
        )
        self.stepper = Stepper(task, config, device, ranks, self.state, self.total, self.reporter.event)
        self.attributes = Attributes(model, None if config.optim.name in OPTIMIZERS else optimizer)
        self.memory_mb: float | None = None  # what a step needs by the estimate, where it was asked
        self.committed_step = 0  # of the newest checkpoint a resumed run would start from
        self.reserved = not config.checkpoint.asynchronous  # whether there is memory to copy the state to, if needed
        self.pace = Pace(task, config, device, self.loader, self.saver, self.state.meter)

    def run(self) -> Outcome:
        if refused := self._plan_memory():
            return refused
        again = self._resume()
        if (most := self.ranks.micro_batch_size) is not None and most < self.state.micro_batch_size:
            self._shrink_to(most)
        try:
            self.ranks.warm_up(self.state.model, lambda: self.stepper.loss(0, self.loader.first()))
        except (RuntimeError, MemoryError) as error:
            if not self._shrink(error):
                raise
        ended = self._tell(again) if again else None
        self.watch(self)
        while not ended and not self.done:
            ended = self._train_epoch() or self._tell(self._close_epoch())
        self._settle()
        return ended or self._finished()

    def _finished(self, kind: OutcomeKind = "complete") -> Outcome:
        why = self.state.early_stopping.diverged or self.state.meter.untrained
        return self.ended("nonfinite" if why else kind, why)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.state.epoch >= self.config.num_epochs or self.state.early_stopping.stopped

    def _plan_memory(self) -> Outcome | None:
        """Where memory is bounded, begin with a micro-batch that fits; an Outcome if there is none to begin with."""
        sampler, of = self.loader.sampler, (self.loader.first, self.reporter.event, self.loader.sampler.halved)
        plan = memory_plan(self.task, self.config, self.device, self.ranks, sampler.micro_batch_size, *of)
        if plan is None:
            return None
        self.memory_mb = plan.asked.peak / 2**20
        if plan.fits is None or plan.refused:
            return self.ended("out_of_memory", plan.refusal())
        return self._set_micro_batch_size(plan.fits)

    def _resume(self) -> Report | None:
        """Continue from the newest committed checkpoint; its report, to be made again for the verdict it was given.

        Where none of those committed is usable, training anew reports the same as the first time.
        """
        s, found = self.state, self.checkpoints.load_latest()
        for damage in self.checkpoints.damaged:
            self.reporter.event("checkpoint_damaged", path=damage.shown, step=damage.ref.step, reason=damage.reason)
        if self.checkpoints.damaged and found is None:
            self.reporter.event("restarted_from_scratch", reason="no committed checkpoint is usable")
        self.checkpoints.sweep()
        if found is None:
            self._start_from(self.config)
            return None
        state, ref = found
        s.load_state_dict(self.ranks.part(state))
        self._set_micro_batch_size(s.micro_batch_size)
        if s.loaded_parallel not in (None, s.parallel):  # from here on it is not what it would have been, to the bit
            self.reporter.event("ranks_changed", step=s.step, before=s.loaded_parallel, now=s.parallel)
        self.committed_step = s.step
        self.checkpoints.tidy(self.config.checkpoint, self._pinned)
        if not self.checkpoints.owns(ref):
            s.meter.begin()
            return None
        self.attributes.told = True  # by an attempt before
        return None if s.report is None else Report(s.step, s.report["metrics"], s.report["epoch"])

    def _start_from(self, config: TrainConfig) -> None:
        """Start from the checkpoint a user names: its weights, optimizer, step and epoch."""
        if config.resume_from is None:
            return
        try:
            self.state.start_from(self.checkpoints.load(config.resume_from), self.ranks.part)
        except CheckpointError as error:
            raise ConfigError(f"train.resume_from: {error}") from error
        self.state.check_epochs_left(config)
        self.state.meter.begin()

    def _train_epoch(self) -> Outcome | None:
        """Train on the rest of the epoch; an Outcome if the fit ends before it does."""
        s = self.state
        s.model.train()
        s.report = None
        self.pace.enter(s.position)
        ended, smaller = None, True
        while smaller:
            ended, smaller = self._train_windows()
        return ended

    def _train_windows(self) -> tuple[Outcome | None, bool]:
        """The epoch from its position on; an Outcome if the fit ends in it, and whether to come again with less."""
        s, every = self.state, self.config.checkpoint.every_steps
        for batches in self.loader.epoch(s.epoch, s.position):
            if self.ranks.leaving(self.reporter):
                return self._leave("preempted"), False
            self._look_after_saves()
            try:
                ended = self._train_window(batches)
            except (RuntimeError, MemoryError) as error:
                if not self._shrink(error):
                    raise
                return None, True
            if ended or s.meter.gave_up:
                return ended or self._give_up(batches), False
            due = every and s.step % every == 0 and s.position < s.windows
            if due and (ended := self._tell(self._ready({}, save=True))):
                return ended, False
        return None, False

    def _train_window(self, batches: list[Any]) -> Outcome | None:
        """One optimizer step, or what is done about a loss that has jumped."""
        s = self.state
        jump = self.stepper.take(batches, self.lr(s.step))
        ended = self._roll_back(batches, *jump) if jump else None
        s.step += 1
        s.position += 1
        self.watch(self)
        return ended

    def _roll_back(self, batches: list[Any], loss: float, norm: float) -> Outcome | None:
        """Pass over a window whose loss has jumped; weights and optimizer go back to the last scheduled save."""
        s, spikes = self.state, self.state.spikes
        report = {"step": s.step, "epoch": s.epoch, "window": s.position, "lr": self.lr(s.step)}
        report |= spikes.report(loss, norm)
        details = {"recent_losses": spikes.losses[-RECENT:], "largest_gradients": loudest(s.model, self.ranks)}
        details["samples"] = self.loader.sampler.indices(s.epoch, s.position)
        said, action = spikes.exhausted(loss), "the trial ends"
        if not said:
            action = self._restore_weights()
            spikes.rolled_back(s.step)
        file = f"anomalies/step-{s.step:08d}.json"
        hand_over(self.reporter, file, as_json(report | {"action": action} | details))
        self.reporter.event("loss_jumped", **report, action=action, report=file)
        return self.ended("nonfinite", said) if said else None

    def _restore_weights(self) -> str:
        """Take the weights and the optimizer of the last scheduled checkpoint; in words, what was done."""
        self._settle()
        spikes, found = self.state.spikes.config, self.checkpoints.load_scheduled(self._scheduled)
        if found is not None:
            self.state.load_weights(self.ranks.part(found[0]))
        to = "the weights stay: there is no checkpoint yet" if found is None else f"back to step {found[1].step}"
        return f"window skipped, {to}, lr times {spikes.lr_factor:g} for {spikes.cooldown} steps"

    def _scheduled(self, step: int) -> bool:
        """Whether a checkpoint is due at `step`; others are an interruption's, and no run without it has them."""
        return self.config.checkpoint.due(step, self.state.epochs.closed_by(step))

    @property
    def _pinned(self) -> Callable[[int], bool] | None:
        """The steps of checkpoints of which retention leaves the newest, to roll back to."""
        return self._scheduled if self.config.rollback.enabled else None

    def _shrink(self, error: BaseException) -> bool:
        """Halve the micro-batch, if memory ran out before the weights had changed; False where that cannot help. The
        window stays, but for what the loss draws at random. Several ranks, which may wait for this one, start again."""
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
        """The learning rate of `step`, this one or the last."""
        own = self.task.lr_scale(step / self.total)
        return self.lr_at(step) * own * self.state.plateau.scale * self.state.spikes.lr_scale(step)

    def _give_up(self, batches: list[Any]) -> Outcome:
        in_a_row = self.config.guard.max_consecutive
        culprit = first_nonfinite(self.state.model, lambda: self.stepper.passes(batches), self.ranks)
        return self.ended("nonfinite", f"loss or gradient was not finite {in_a_row} steps in a row: {culprit}.")

    def _close_epoch(self) -> Report:
        """Evaluate and save; what is to be reported."""
        s, c = self.state, self.config
        self.stepper.drain()
        metrics = s.meter.metrics() | {"train/lr": self.lr(s.step - 1)} | self.pace.rates() | self._extras()
        metrics |= self._evaluate() | self.pace.times(self.ranks.everyone, metrics)
        s.epoch, s.position = s.epoch + 1, 0
        s.meter.new_epoch()
        s.watch(metrics, c)
        s.report = {"epoch": s.epoch, "metrics": metrics}
        every, last = c.checkpoint.every_epochs, self.done
        return self._ready(metrics, epoch=s.epoch, save=every is not None and (last or s.epoch % every == 0))

    def _extras(self) -> dict[str, float]:
        """How large the model is, and metrics of what is only there where it was asked for."""
        s, found = self.state, {"train/parameters": float(self.parameters)}
        if self.memory_mb is not None:
            found["system/memory_estimate_mb"] = self.memory_mb
        if s.loss_scale is not None:
            found["train/loss_scale"] = s.loss_scale.factor.item()
        if self.config.rollback.enabled:
            found["train/rollbacks"] = float(s.spikes.rollbacks)
        return found | self.ranks.communication()

    def _evaluate(self) -> dict[str, float]:
        seed_all(derive(self.config.seed, "evaluate", self.state.step))
        self.task.progress, self.task.step = self.state.step / self.total, self.state.step
        model = self.state.average.model.eval()
        with torch.no_grad(), autocast(self.config.precision, self.device):
            metrics = measured(self.task, model)
            for name, text in self.task.artifacts(model).items():
                hand_over(self.reporter, name, text)
        return self.ranks.agree(metrics)

    def _ready(self, metrics: Mapping[str, float], *, epoch: int | None = None, save: bool) -> Report:
        """A report, with a checkpoint if one is saved and waited for."""
        if save:
            self._save(metrics)
        ref = None if self.config.checkpoint.asynchronous else self.saver.finish()
        return Report(self.state.step, metrics, epoch, ref)

    def _tell(self, r: Report) -> Outcome | None:
        """Report, and obey; an Outcome if the fit ends here."""
        return self._answered(r, self.reporter.report(r.step, r.metrics, epoch=r.epoch, checkpoint=r.checkpoint))

    def _answered(self, report: Report, verdict: Verdict) -> Outcome | None:
        self._committed(report.checkpoint)
        if verdict.kind == "restart_from":
            return self.ended("restarted")
        if verdict.kind == "continue" or self.done:  # nothing is cut short at the end
            return None
        return self._finished("pruned") if verdict.kind == "stop" else self._leave(ENDS[verdict.kind])

    def _save(self, metrics: Mapping[str, float]) -> None:
        self._settle()
        self.stepper.drain()
        self.attributes.tell(self.reporter.event, self.state.step)
        s, background = self.state, self.config.checkpoint.asynchronous
        whole = self.ranks.whole(s.state_dict())
        self.saver.start(whole, step=s.step, epoch=s.epoch, metrics=metrics, background=background)

    def _look_after_saves(self) -> None:
        """Commit the save that is durable by now; make the memory for copies of the state, once there is all of it."""
        if self.saver.ready:
            self._settle()
        if not self.reserved and self.ranks.keeper(self.state.optimizer).state:
            self.reserved = True
            self.saver.reserve(self.ranks.own(self.state.state_dict()))

    def _settle(self) -> None:
        """Wait for the save that goes on, if one does, and commit it. So whatever follows, a rollback or an end, finds
        the checkpoints that it would find if training had waited for each."""
        if (ref := self.saver.finish()) is not None:
            failpoint("checkpoint.before_commit")
            self.reporter.report(self.state.step, {}, checkpoint=ref)
            self._committed(ref)

    def _committed(self, ref: CheckpointRef | None) -> None:
        if ref is not None:
            self.committed_step = ref.step
            self.checkpoints.commit(ref, self.config.checkpoint, self._pinned)

    def _leave(self, kind: OutcomeKind) -> Outcome:
        """End so that another attempt goes on from exactly here: with a committed checkpoint of this step."""
        self._settle()
        if self.committed_step != self.state.step:
            self._save({})
            self._settle()
        return self.ended(kind)

    def ended(self, kind: OutcomeKind, error: str = "") -> Outcome:
        return Outcome(kind, step=self.state.step, epoch=self.state.epoch, error=error)
