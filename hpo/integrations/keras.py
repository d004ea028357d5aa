"""Runs Keras 3's `fit` as a trial, through `TrialCallback`."""

from __future__ import annotations

import random
from typing import Any

from hpo.integrations import trial as trials
from hpo.integrations.trial import Trial

try:
    import keras
except ModuleNotFoundError as error:
    raise trials.lacking(error, "keras", "keras") from error

_FILE = "model.keras"


class TrialCallback(keras.callbacks.Callback):
    """Reports each epoch's logs, saves the model with its optimizer as `model.keras`, and stops the training.

        callback = TrialCallback(trial)
        model.fit(x, y, epochs=9, initial_epoch=callback.initial_epoch, callbacks=[callback])

    initial_epoch  the number of epochs that the trial has completed
    resume_path    the model to resume from, loaded when the fit begins; None for a new trial

    A model's file holds no random state. The generators of the backend, NumPy, Python and each layer that draws are
    therefore seeded before each epoch, from the trial's seed and the epoch. Raises TrainerError for a fit that does not
    begin at the trial's epoch.
    """

    model: Any  # pyright: ignore[reportIncompatibleMethodOverride] set by Keras before it calls

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial
        self.resume_path = trials.resumed(trial, _FILE)
        self.initial_epoch = trial.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.resume_path is None:
            return
        optimizer = self.model.optimizer
        if not optimizer.built:  # an optimizer that is not built loads no state
            optimizer.build(self.model.trainable_variables)
        self.model.load_weights(self.resume_path)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        trials.check_begins("epoch", self._trial.epoch, epoch, "pass initial_epoch=callback.initial_epoch to fit()")
        draw = random.Random(trials.seed_at(self._trial, epoch))
        keras.utils.set_random_seed(draw.getrandbits(31))
        for variable in self.model.variables:  # each layer that draws has a state, which Keras does not save
            if variable.path.endswith("seed_generator_state"):
                variable.assign([draw.getrandbits(31), 0])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        def write(directory: Any) -> None:
            self.model.save(directory / _FILE)

        if trials.report(self._trial, logs or {}, write, epoch=epoch + 1):
            self.model.stop_training = True
