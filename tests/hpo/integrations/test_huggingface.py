"""The Trainer of transformers as a trial, by transformers itself."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from told import Told, check_resumes, fit
from torch import nn

transformers = pytest.importorskip("transformers", reason="runs where make test has installed transformers")
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed  # noqa: E402

from hpo.integrations.huggingface import TrialCallback  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = [{"x": x, "labels": (x.sum() > 0).long()} for x in X]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def measure(outputs: Any) -> dict[str, Any]:
    right = outputs.predictions.argmax(axis=1) == outputs.label_ids
    return {"accuracy": right.mean(), "of_each": right.tolist()}


def training(*, callbacks=(), resume=True, own=True, eval_dataset: Any = DATA, **given: Any):
    given = {"eval_strategy": "epoch", "num_train_epochs": 4, "logging_strategy": "epoch"} | given

    def function(trial):
        set_seed(trial.seed)
        callback = TrialCallback(trial)
        args = TrainingArguments(
            output_dir=str(trial.directory if own else trial.directory.parent / "shared"),
            per_device_train_batch_size=10,
            learning_rate=0.02,
            seed=trial.seed,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **given,
        )
        trainer = Trainer(
            Net(),
            args,
            train_dataset=DATA,
            eval_dataset=eval_dataset,
            compute_metrics=measure,
            callbacks=[callback, *(make() for make in callbacks)],
        )
        trainer.train(resume_from_checkpoint=callback.resume_path if resume else None)
        trainer.evaluate()  # of the user's own, after the training

    return function


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 3},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "accuracy"},
        {"load_best_model_at_end": True, "save_strategy": "epoch", "save_total_limit": 2},
        {"eval_on_start": True, "save_strategy": "steps", "save_steps": 3},
    ],
    ids=lambda given: next(iter(given), "plain"),
)
def test_interrupted_it_trains_to_the_same_bits(given, tmp_path):
    reports = check_resumes(training(**given), tmp_path, cuts=(2,) if given else (1, 2, 3))
    assert [epoch for _, epoch, _ in reports] == [1, 2, 3, 4]
    assert set(reports[0][2]) == {"eval_loss", "eval_accuracy"}, "no speeds, nothing that is not a number"


def test_steps_are_reported_and_resumed_in_the_middle_of_an_epoch(tmp_path):
    """An epoch has four steps; it is cut after the 6th and the 9th."""
    reports = check_resumes(training(eval_strategy="steps", eval_steps=3), tmp_path, cuts=(1, 2), steps_per_epoch=4)
    assert [(step, epoch) for step, epoch, _ in reports] == [(3, None), (6, 1), (9, 2), (12, 3), (15, None), (16, 4)]


def test_several_evaluation_sets_are_one_report(tmp_path):
    reports = check_resumes(training(eval_dataset={"near": DATA[:20], "far": DATA[20:]}), tmp_path, cuts=(2,))
    assert set(reports[0][2]) == {f"eval_{part}_{name}" for part in ("near", "far") for name in ("loss", "accuracy")}


def test_the_files_are_a_checkpoint_and_stopping_stops(tmp_path):
    told = Told({2: "stop"})
    assert fit(training(), tmp_path, told).kind == "pruned"
    assert [epoch for _, epoch, _ in told.reports] == [1, 2]
    files = told.committed[0].path / "files"
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= {path.name for path in files.iterdir()}
    assert not [name for name in told.artifacts if "checkpoint" in name], "what is saved is no artifact as well"


def test_early_stopping_keeps_its_count_where_the_trainer_restores_it(tmp_path):
    given = {"load_best_model_at_end": True, "save_strategy": "epoch", "restore_callback_states_from_checkpoint": True}
    patience = [lambda: EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=9.0)]
    reports = check_resumes(training(callbacks=patience, **given), tmp_path, cuts=(1, 2))
    assert len(reports) == 3


def killed_then(function, tmp_path, **declared):
    first = Told({2: "leave"})
    fit(function, tmp_path, first, **declared)
    fit(function, tmp_path, Told(), first.committed[:1], **declared)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda trial: TrialCallback(None), "TrialCallback needs the trial .* not None"),
        (training(eval_strategy="no"), "eval_strategy='no' evaluates nothing"),
        (
            training(save_strategy="best", metric_for_best_model="loss"),
            "save_strategy='best' leaves checkpoints out",
        ),
        (training(own=False), "shared' may be another trial's as well: pass output_dir=trial.directory"),
        (
            training(resume=False),
            "goes on after epoch 2, and this training after epoch 0: pass resume_from_checkpoint=",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(function, said, tmp_path):
    with pytest.raises(TrainerError, match=said):
        killed_then(function, tmp_path)


def test_ranks_are_refused(tmp_path):
    trial = SimpleNamespace(report=None, directory=tmp_path)
    callback = TrialCallback.__new__(TrialCallback)
    callback._trial = trial
    with pytest.raises(TrainerError, match=re.escape("a trial is one process, and this Trainer has 2")):
        callback.on_train_begin(SimpleNamespace(world_size=2), None, None)
