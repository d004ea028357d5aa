"""Runs LightGBM's training as a trial, through `TrialCallback`."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from hpo.integrations import trial as trials
from hpo.integrations.trial import Trial
from trainer.errors import TrainerError

try:
    from lightgbm import Booster
    from lightgbm.callback import CallbackEnv, EarlyStopException
except ModuleNotFoundError as error:
    raise trials.lacking(error, "lightgbm", "lightgbm") from error

_FILE = "model.txt"
_SEEDS = ("bagging_seed", "feature_fraction_seed", "extra_seed", "objective_seed")
_BAGS = ("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction")
log = logging.getLogger(__name__)


class TrialCallback:
    """Reports every `every` rounds as an epoch, saves the model as `model.txt`, and stops the training.

        callback = TrialCallback(trial, every=10)
        if rounds := callback.rounds_left(90):
            lightgbm.train(params, data, rounds, valid_sets=[held_out], valid_names=["val"],
                           init_model=callback.resume_path, callbacks=callback.callbacks)

    every        the rounds of an epoch
    resume_path  the model to resume from; None for a new trial
    callbacks    the two that LightGBM calls, before and after a round

    A metric is named after its data and LightGBM's name, such as `val/binary_logloss`. A model's file holds no random
    state, so LightGBM is seeded before each epoch's first round, from the trial's seed and the round. A model that
    LightGBM cannot continue (see `unsaved`) is not saved: its trial begins anew after a kill, and reports the same
    values again. Raises TrainerError for `lightgbm.cv`, and for a training that does not begin at the trial's round.
    """

    def __init__(self, trial: Trial, *, every: int = 1) -> None:
        self._trial, self._every = trial, trials.rounds_of_epoch(every)
        self.resume_path = trials.resumed(trial, _FILE)
        self._unsaved: str | None = None
        self._settings: dict[str, str] = {}
        self.callbacks = [_Call(self._before, before_iteration=True), _Call(self._after, before_iteration=False)]

    def rounds_left(self, num_boost_round: int) -> int:
        """Returns the rounds left of `num_boost_round`, to be passed to LightGBM, which does not accept 0."""
        return trials.rounds_left(self._trial, self._every, num_boost_round)

    def _before(self, env: CallbackEnv) -> None:
        model: Any = env.model
        if env.iteration == env.begin_iteration:
            if not isinstance(model, Booster):
                raise TrainerError(
                    "TrialCallback follows one model, and lightgbm.cv trains several: use lightgbm.train."
                )
            fix = "pass init_model=callback.resume_path"
            trials.check_begins("round", self._trial.epoch * self._every, env.begin_iteration, fix)
            self._settings = settings(model)
            self._unsaved = unsaved(self._settings, self._every)
            if self._unsaved:
                log.warning("%s: nothing is saved, and the trial begins anew after a kill.", self._unsaved)
        if env.iteration % self._every == 0:
            seed = trials.seed_at(self._trial, env.iteration)
            bags = {name: share for name in _BAGS if (share := float(self._settings[name])) < 1}
            model.reset_parameter({name: 0.75 * share for name, share in bags.items()})  # only a change of it reseeds
            model.reset_parameter(bags | dict.fromkeys(_SEEDS, seed))

    def _after(self, env: CallbackEnv) -> None:
        rounds = env.iteration + 1
        if rounds % self._every:
            return

        def write(directory: Path) -> None:
            env.model.save_model(directory / _FILE)  # pyright: ignore[reportAttributeAccessIssue]

        results = env.evaluation_result_list or []
        metrics = {f"{entry[0]}/{entry[1]}": float(entry[2]) for entry in results}
        ends = trials.report(self._trial, metrics, None if self._unsaved else write, epoch=rounds // self._every)
        if ends:
            raise EarlyStopException(env.iteration, results)


class _Call:
    """Has the attributes that LightGBM reads from a callback."""

    def __init__(self, call: Any, *, before_iteration: bool) -> None:
        self._call, self.before_iteration = call, before_iteration
        self.order = 25  # after the callbacks that record, before early stopping

    def __call__(self, env: CallbackEnv) -> None:
        self._call(env)


def settings(model: Booster) -> dict[str, str]:
    """Returns all parameters of a model by their main names, as LightGBM has interpreted them."""
    return dict(re.findall(r"^\[(\w+): (.*)\]$", model.model_to_string(), re.MULTILINE))


def unsaved(settings: dict[str, str], every: int) -> str | None:
    """Returns why LightGBM cannot continue a model with these settings as if uninterrupted; None if it can."""
    if settings["boosting"] != "gbdt":
        return f"LightGBM does not go on with boosting={settings['boosting']!r}"
    if settings["data_sample_strategy"] != "bagging":
        return "LightGBM begins data_sample_strategy='goss' with rounds of all rows, whenever it goes on"
    if settings["linear_tree"] != "0":
        return "LightGBM's linear_tree goes on with rounded values"
    if settings["use_quantized_grad"] != "0" and settings["stochastic_rounding"] != "0":
        return "LightGBM does not keep the random numbers of stochastic_rounding"
    if any(settings[name].strip("0., ") for name in settings if name.startswith("cegb_penalty")):
        return "LightGBM does not keep which features cegb has paid for"
    freq = int(settings["bagging_freq"])
    if freq and every % freq and any(float(settings[name]) < 1 for name in _BAGS):
        return f"LightGBM counts bagging_freq={freq} from where it goes on, and every={every} is not a multiple of it"
    return None
