"""Runs Lightning's Trainer as a trial, through `TrialCallback`."""

from __future__ import annotations

import random
from typing import Any

from hpo.integrations import trial as trials
from hpo.integrations.trial import Trial
from trainer.errors import TrainerError

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
except ModuleNotFoundError as error:
    raise trials.lacking(error, "lightning", "lightning") from error

import numpy as np
import torch

_FILE = "trainer.ckpt"


class TrialCallback(Checkpoint):
    """Reports each epoch with all logged metrics, saves Lightning's checkpoint with it, and stops the trainer.

        callback = TrialCallback(trial)
        trainer = Trainer(max_epochs=9, callbacks=[callback])
        trainer.fit(module, data, ckpt_path=callback.resume_path)

    resume_path  Lightning's checkpoint to resume from; None for a new trial

    Lightning's checkpoint holds no random state, so the generators of torch, NumPy and Python are seeded before each
    epoch, from the trial's seed and the epoch. As a `Checkpoint`, this callback runs after all others; without another
    one Lightning writes no checkpoints of its own. If the trainer validates, an epoch without validation is not
    reported. Raises TrainerError for several processes, and for a fit that does not begin at the trial's epoch.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.resume_path = trials.resumed(trial, _FILE)
        self._seeded = self._validated = self._stopped = False
        self._metrics: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer, Trainer):
            raise TrainerError(
                f"TrialCallback is of lightning.pytorch, not of {type(trainer).__module__}: take its Trainer."
            )
        if trainer.world_size > 1:
            raise TrainerError(f"a trial is one process, and this Trainer has {trainer.world_size}: pass devices=1.")
        self._seed(self._trial.epoch)  # the first epoch's order is drawn before the epoch begins

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fix = "pass ckpt_path=callback.resume_path to trainer.fit()"
        trials.check_begins("epoch", self._trial.epoch, trainer.current_epoch, fix)
        for config in trainer.lr_scheduler_configs:  # Lightning steps these after an epoch's checkpoint is saved
            due = config.interval == "epoch" and trainer.current_epoch % config.frequency == 0
            if config.reduce_on_plateau and due and config.monitor in self._metrics:
                config.scheduler.step(self._metrics[config.monitor])  # pyright: ignore[reportArgumentType]
        if self._stopped:  # another callback stopped it in the checkpoint's epoch
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._seeded:
            self._seed(trainer.current_epoch)
        self._seeded = self._validated = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.enable_validation and not self._validated:
            return
        self._metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._stopped = trainer.should_stop

        def write(directory: Any) -> None:
            trainer.save_checkpoint(directory / _FILE)

        if trials.report(self._trial, self._metrics, write, epoch=trainer.current_epoch + 1):
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0  # which would keep it running

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self._metrics, "stopped": self._stopped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._metrics, self._stopped = state_dict["metrics"], state_dict["stopped"]

    def _seed(self, epoch: int) -> None:
        value = trials.seed_at(self._trial, epoch)
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)
        self._seeded = True
