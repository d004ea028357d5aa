"""Keras's `fit` as a trial, by Keras itself on torch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from told import Told, check_resumes, fit

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where make test has installed keras")

from hpo.integrations.keras import TrialCallback  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402

# h5py's arrays, as NumPy sees them
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")
LAYERS = keras.layers


def decaying() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7), momentum=0.9)


def training(*, optimizer: Any = None, resume=True, callbacks=(), **given: Any):
    def function(trial):
        keras.utils.set_random_seed(trial.seed)
        hidden = [LAYERS.Dense(8, "relu"), LAYERS.BatchNormalization(), LAYERS.Dropout(0.3), LAYERS.GaussianNoise(0.1)]
        model = keras.Sequential([*hidden, LAYERS.Dense(2, "softmax")])  # built by the fit
        model.compile(optimizer() if optimizer else "adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        callback = TrialCallback(trial)
        given_to_fit = {"validation_data": (X, Y)} | given
        begins = callback.initial_epoch if resume else 0
        model.fit(
            X, Y, 16, 4, initial_epoch=begins, callbacks=[callback, *callbacks], verbose=0, shuffle=True, **given_to_fit
        )

    return function


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"optimizer": decaying},
        {"optimizer": lambda: keras.optimizers.AdamW(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)},
        {"validation_freq": 2},
        {"validation_data": None},
    ],
    ids=["plain", "schedule", "average", "validation_freq", "no validation"],
)
def test_interrupted_it_trains_to_the_same_bits(given, tmp_path):
    reports = check_resumes(training(**given), tmp_path, cuts=(2,) if given else (1, 2, 3))
    assert [epoch for _, epoch, _ in reports] == [1, 2, 3, 4]
    assert {"loss", "accuracy"} <= set(reports[1][2])
    assert ("val_loss" in reports[1][2]) == ("validation_data" not in given)


def test_without_seeds_of_the_epoch_it_would_not(tmp_path, monkeypatch):
    monkeypatch.setattr(TrialCallback, "on_epoch_begin", lambda self, epoch, logs=None: None)
    with pytest.raises(AssertionError, match="cut after epoch 2"):
        check_resumes(training(), tmp_path, cuts=(2,))


def test_the_file_is_a_model_and_stopping_stops(tmp_path):
    told = Told({2: "stop"})
    assert fit(training(), tmp_path, told).kind == "pruned"
    assert [epoch for _, epoch, _ in told.reports] == [1, 2]
    model = keras.models.load_model(told.committed[0].path / "files" / "model.keras")
    loss, accuracy = model.evaluate(X, Y, verbose=0)
    assert told.reports[-1][2]["val_loss"] == pytest.approx(loss)
    assert told.reports[-1][2]["val_accuracy"] == pytest.approx(accuracy)
    assert told.artifacts == {}


def killed_then(function, tmp_path):
    first = Told({2: "leave"})
    fit(function, tmp_path, first)
    fit(function, tmp_path, Told(), first.committed[:1])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda trial: TrialCallback(None), "TrialCallback needs the trial .* not None"),
        (training(resume=False), "goes on after epoch 2, and this training after epoch 0: pass initial_epoch=callback"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(function, said, tmp_path):
    with pytest.raises(TrainerError, match=said):
        killed_then(function, tmp_path)
