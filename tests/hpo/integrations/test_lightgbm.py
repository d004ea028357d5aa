"""LightGBM's training as a trial, by LightGBM itself."""

from __future__ import annotations

import logging
import re
from typing import Any

import lightgbm
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from told import Told, check_resumes, fit

from hpo.integrations.lightgbm import TrialCallback
from trainer.errors import TrainerError

X, Y = load_breast_cancer(return_X_y=True)
X, Y = X[:200], Y[:200]
MODELS: list[str] = []


def training(every: int = 3, **given: Any):
    """A function of 12 rounds that keeps the trees of each model in MODELS."""
    params = {"objective": "binary", "num_threads": 1, "verbose": -1, "min_data_in_leaf": 5} | given

    def function(trial):
        callback, data = TrialCallback(trial, every=every), lightgbm.Dataset(X, Y, free_raw_data=False)
        if rounds := callback.rounds_left(12):
            model = lightgbm.train(
                params,
                data,
                rounds,
                valid_sets=[data],
                valid_names=["val"],
                init_model=callback.resume_path,
                callbacks=callback.callbacks,
            )
            MODELS.append(model.model_to_string().partition("parameters:")[0])

    return function


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"subsample": 0.5, "subsample_freq": 1},
        {"bagging_fraction": 0.5, "bagging_freq": 3, "feature_fraction": 0.5, "feature_fraction_bynode": 0.5},
        {"pos_bagging_fraction": 0.5, "neg_bagging_fraction": 0.7, "bagging_freq": 1},
        {"extra_trees": True},
        {"objective": "l1", "bagging_fraction": 0.5, "bagging_freq": 1},
        {"objective": "multiclass", "num_class": 2, "bagging_fraction": 0.5, "bagging_freq": 1},
        {"use_quantized_grad": True, "stochastic_rounding": False},
    ],
    ids=lambda params: "-".join(params) or "plain",
)
def test_interrupted_it_grows_the_same_trees(params, tmp_path):
    MODELS.clear()
    reports = check_resumes(training(**params), tmp_path, cuts=(1, 3))
    assert [epoch for _, epoch, _ in reports] == [1, 2, 3, 4]
    whole, *cut = MODELS
    assert all(trees == whole for trees in cut[1::2]), "each second one is the rest of the one before it"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"boosting": "dart"}, "boosting='dart'"),
        ({"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}, "boosting='rf'"),
        ({"data_sample_strategy": "goss"}, "'goss'"),
        ({"linear_tree": True}, "linear_tree"),
        ({"use_quantized_grad": True}, "stochastic_rounding"),
        ({"cegb_penalty_split": 0.01}, "cegb"),
        ({"bagging_fraction": 0.5, "bagging_freq": 2}, "bagging_freq=2 .* every=3 is not a multiple"),
    ],
    ids=str,
)
def test_what_cannot_go_on_is_not_saved_and_begins_anew(params, said, tmp_path, caplog):
    whole, first, again = Told(), Told({2: "leave"}), Told()
    with caplog.at_level(logging.WARNING):
        fit(training(**params), tmp_path / "whole", whole)
    assert len(caplog.records) == 1 and caplog.messages[0].endswith("the trial begins anew after a kill.")
    assert re.search(said, caplog.messages[0])
    fit(training(**params), tmp_path / "cut", first)
    fit(training(**params), tmp_path / "cut", again, first.committed)
    assert first.committed == [] and again.reports == whole.reports and len(whole.reports) == 4


def test_the_file_is_a_model_and_stopping_stops(tmp_path):
    told = Told({2: "stop"})
    assert fit(training(), tmp_path, told).kind == "pruned"
    assert [epoch for _, epoch, _ in told.reports] == [1, 2]
    model = lightgbm.Booster(model_file=told.committed[0].path / "files" / "model.txt")
    assert model.current_iteration() == 6
    assert told.reports[-1][2] == {"val/binary_logloss": pytest.approx(log_loss(Y, model.predict(X)))}
    assert told.artifacts == {}


def test_the_estimator_of_scikit_learn_takes_it(tmp_path):
    def function(trial):
        callback = TrialCallback(trial, every=3)
        model = lightgbm.LGBMClassifier(
            n_estimators=callback.rounds_left(12), n_jobs=1, subsample=0.5, subsample_freq=1, verbose=-1
        )
        model.fit(X, Y, eval_X=X, eval_y=Y, init_model=callback.resume_path, callbacks=callback.callbacks)

    check_resumes(function, tmp_path, cuts=(2,))


def ignoring_the_checkpoint(trial):
    data, callbacks = lightgbm.Dataset(X, Y), TrialCallback(trial, every=3).callbacks
    lightgbm.train({"verbose": -1}, data, 12, valid_sets=[data], callbacks=callbacks)


def cross_validated(trial):
    lightgbm.cv({"verbose": -1}, lightgbm.Dataset(X, Y), 3, callbacks=TrialCallback(trial).callbacks)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda trial: TrialCallback(None), "TrialCallback needs the trial .* not None: write TrialCallback.trial."),
        (lambda trial: TrialCallback(trial, every=3).rounds_left(10), "10 rounds are no whole epochs of every=3"),
        (
            lambda trial: lightgbm.train(
                {"verbose": -1}, lightgbm.Dataset(X, Y), 1, callbacks=TrialCallback(trial).callbacks
            ),
            "nothing to report after epoch 1: give the training data to evaluate on",
        ),
        (cross_validated, "lightgbm.cv trains several: use lightgbm.train"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(function, said, tmp_path):
    with pytest.raises(TrainerError, match=said):
        fit(function, tmp_path, Told())


def test_a_training_that_ignores_the_checkpoint_is_refused(tmp_path):
    first = Told({2: "leave"})
    fit(ignoring_the_checkpoint, tmp_path, first)
    with pytest.raises(TrainerError, match="goes on after round 6, and this training after round 0: pass init_model="):
        fit(ignoring_the_checkpoint, tmp_path, Told(), first.committed[:1])
