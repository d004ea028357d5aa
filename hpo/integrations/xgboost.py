"""Runs XGBoost's training as a trial, through `TrialCallback`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpo.integrations import trial as trials
from hpo.integrations.trial import Trial
from trainer.errors import TrainerError

try:
    from xgboost import Booster
    from xgboost.callback import TrainingCallback
except ModuleNotFoundError as error:
    raise trials.lacking(error, "xgboost", "xgboost") from error

_FILE = "model.ubj"


class TrialCallback(TrainingCallback):
    """Reports every `every` rounds as an epoch, saves the booster as `model.ubj`, and stops the training.

        callback = TrialCallback(trial, every=10)
        xgboost.train(params, data, callback.rounds_left(90), evals=[(held_out, "val")],
                      xgb_model=callback.resume_path, callbacks=[callback])

    every        the rounds of an epoch
    resume_path  the booster to resume from; None for a new trial

    A metric is named after its data and XGBoost's name, such as `val/logloss`. A booster's file holds neither random
    state nor the state of its tree builder. The booster is therefore reset and seeded before each epoch's first round,
    from the trial's seed and the round, so the trees are those of an uninterrupted training. Raises TrainerError for
    `xgboost.cv`, and for a training that does not begin at the trial's round.
    """

    def __init__(self, trial: Trial, *, every: int = 1) -> None:
        self._trial, self._every = trial, trials.rounds_of_epoch(every)
        self.resume_path = trials.resumed(trial, _FILE)

    def rounds_left(self, num_boost_round: int) -> int:
        """Returns the rounds left of `num_boost_round`, to be passed to XGBoost."""
        return trials.rounds_left(self._trial, self._every, num_boost_round)

    def before_training(self, model: Any) -> Any:
        if not isinstance(model, Booster):
            raise TrainerError("TrialCallback follows one booster, and xgboost.cv trains several: use xgboost.train.")
        self._rounds = self._trial.epoch * self._every
        fix = "pass xgb_model=callback.resume_path"
        trials.check_begins("round", self._rounds, model.num_boosted_rounds(), fix)
        return model

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if self._rounds % self._every == 0:
            model.reset()
            model.set_param({"seed": trials.seed_at(self._trial, self._rounds)})
        return False

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self._rounds += 1
        if self._rounds % self._every:
            return False

        def write(directory: Path) -> None:
            model.save_model(directory / _FILE)

        metrics = {
            f"{data}/{name}": float(values[-1]) for data, logs in evals_log.items() for name, values in logs.items()
        }
        return trials.report(self._trial, metrics, write, epoch=self._rounds // self._every)
