"""XGBoost's training as a trial, by XGBoost itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import xgboost
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from told import Told, check_resumes, fit

from hpo.integrations.xgboost import TrialCallback
from trainer.errors import TrainerError

X, Y = load_breast_cancer(return_X_y=True)
X, Y = X[:200], Y[:200]
DUMPS: list[list[str]] = []


def training(**given: Any):
    """A function of 12 rounds, three an epoch, that keeps each booster's trees in DUMPS."""
    params = {"objective": "binary:logistic", "nthread": 1} | given

    def function(trial):
        callback, data = TrialCallback(trial, every=3), xgboost.DMatrix(X, Y)
        booster = xgboost.train(
            params,
            data,
            callback.rounds_left(12),
            evals=[(data, "val")],
            xgb_model=callback.resume_path,
            callbacks=[callback],
            verbose_eval=False,
        )
        DUMPS.append(booster.get_dump(dump_format="json"))

    return function


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"subsample": 0.5, "colsample_bytree": 0.5, "colsample_bynode": 0.5},
        {"booster": "dart", "rate_drop": 0.5},
        {"booster": "gblinear", "updater": "coord_descent", "feature_selector": "random"},
        {"tree_method": "exact", "subsample": 0.5, "colsample_bylevel": 0.5},
        {"tree_method": "approx", "subsample": 0.5, "num_parallel_tree": 2},
        {"objective": "multi:softprob", "num_class": 2, "subsample": 0.5},
        {"objective": "reg:quantileerror", "quantile_alpha": 0.3, "subsample": 0.5},
    ],
    ids=lambda params: "-".join(params) or "plain",
)
def test_interrupted_it_grows_the_same_trees(params, tmp_path):
    DUMPS.clear()
    reports = check_resumes(training(**params), tmp_path, cuts=(1, 3))
    assert [epoch for _, epoch, _ in reports] == [1, 2, 3, 4] and len(reports[0][2]) == 1
    whole, *cut = DUMPS
    assert all(trees == whole for trees in cut[1::2]), "each second one is the rest of the one before it"


def test_the_file_is_a_booster_and_stopping_stops(tmp_path):
    told = Told({2: "stop"})
    assert fit(training(), tmp_path, told).kind == "pruned"
    assert [epoch for _, epoch, _ in told.reports] == [1, 2]
    booster = xgboost.Booster(model_file=told.committed[0].path / "files" / "model.ubj")
    assert booster.num_boosted_rounds() == 6
    assert told.reports[-1][2]["val/logloss"] == pytest.approx(log_loss(Y, booster.predict(xgboost.DMatrix(X))))
    assert told.artifacts == {}


def test_the_estimator_of_scikit_learn_takes_it(tmp_path):
    def function(trial):
        callback = TrialCallback(trial, every=3)
        rounds = callback.rounds_left(12)
        model = xgboost.XGBClassifier(n_estimators=rounds, n_jobs=1, subsample=0.5, callbacks=[callback])
        model.fit(X, Y, eval_set=[(X, Y)], xgb_model=callback.resume_path, verbose=False)

    check_resumes(function, tmp_path, cuts=(2,))


def ignoring_the_checkpoint(trial):
    data = xgboost.DMatrix(X, Y)
    xgboost.train({}, data, 12, evals=[(data, "val")], callbacks=[TrialCallback(trial, every=3)], verbose_eval=False)


def cross_validated(trial):
    xgboost.cv({}, xgboost.DMatrix(X, Y), 3, callbacks=[TrialCallback(trial)])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda trial: TrialCallback(None), "TrialCallback needs the trial .* not None: write TrialCallback.trial."),
        (lambda trial: TrialCallback(SimpleNamespace(report=print)), "needs the trial that the training function"),
        (lambda trial: TrialCallback(trial, every=0), "every=0.* must be a whole number of rounds from 1"),
        (lambda trial: TrialCallback(trial, every=3).rounds_left(10), "10 rounds are no whole epochs of every=3"),
        (
            lambda trial: xgboost.train({}, xgboost.DMatrix(X, Y), 1, callbacks=[TrialCallback(trial)]),
            "nothing to report after epoch 1: give the training data to evaluate on",
        ),
        (cross_validated, "xgboost.cv trains several: use xgboost.train"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(function, said, tmp_path):
    with pytest.raises(TrainerError, match=said):
        fit(function, tmp_path, Told())


def test_a_training_that_ignores_the_checkpoint_is_refused(tmp_path):
    first = Told({2: "leave"})
    fit(ignoring_the_checkpoint, tmp_path, first)
    with pytest.raises(TrainerError, match="goes on after round 6, and this training after round 0: pass xgb_model="):
        fit(ignoring_the_checkpoint, tmp_path, Told(), first.committed[:1])
