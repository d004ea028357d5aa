"""Lightning's Trainer as a trial, by Lightning itself."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

lightning = pytest.importorskip("lightning", reason="runs where make test has installed lightning")
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging  # noqa: E402
from told import Told, check_resumes, fit  # noqa: E402

from hpo.integrations.lightning import TrialCallback  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()


class Module(lightning.LightningModule):
    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        self.schedule = schedule
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        self.log("lr", self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.schedule == "plateau":  # which lowers the rate at every epoch
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=9.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.schedule:
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": self.schedule}}
        return optimizer


class Noisy(Dataset):
    """Draws from the generators of NumPy and Python, as augmentations do."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + np.random.normal() + random.random(), Y[index]


def training(*, schedule="", callbacks=(), module: Any = Module, data=None, resume=True, **given: Any):
    given = {"max_epochs": 4, "accelerator": "cpu", "devices": 1, "logger": False} | given

    def function(trial):
        lightning.seed_everything(trial.seed, verbose=False)
        net, callback = module(schedule), TrialCallback(trial)
        trainer = Trainer(
            callbacks=[callback, *(make() for make in callbacks)],
            enable_progress_bar=False,
            enable_model_summary=False,
            **given,
        )
        train = DataLoader(data or TensorDataset(X, Y), batch_size=16, shuffle=True)
        path = callback.resume_path if resume else None
        trainer.fit(net, train, DataLoader(TensorDataset(X, Y), batch_size=24), ckpt_path=path)

    return function


@pytest.mark.parametrize("schedule", ["", "epoch", "step", "plateau"])
def test_interrupted_it_trains_to_the_same_bits(schedule, tmp_path):
    reports = check_resumes(training(schedule=schedule), tmp_path, cuts=(2,) if schedule else (1, 2, 3))
    assert [epoch for _, epoch, _ in reports] == [1, 2, 3, 4]
    assert set(reports[0][2]) == {"train_loss", "val_loss", "lr"}, "also what is logged at the end of an epoch"
    assert (len({metrics["lr"] for _, _, metrics in reports}) > 1) == bool(schedule)


@pytest.mark.parametrize(
    "given",
    [
        {"callbacks": [partial(EMAWeightAveraging, decay=0.9)]},
        {"val_check_interval": 1},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"data": Noisy()},
        {"limit_val_batches": 0},
    ],
    ids=lambda given: next(iter(given)),
)
def test_interrupted_it_trains_to_the_same_bits_whatever_is_set(given, tmp_path):
    check_resumes(training(**given), tmp_path, cuts=(2,))


def test_without_seeds_of_the_epoch_it_would_not(tmp_path, monkeypatch):
    """Lightning's checkpoints have no random numbers, so this is what the seeding is for."""
    monkeypatch.setattr(TrialCallback, "_seed", lambda self, epoch: None)
    with pytest.raises(AssertionError, match="cut after epoch 2"):
        check_resumes(training(), tmp_path, cuts=(2,))


def test_only_epochs_with_a_validation_are_reported(tmp_path):
    reports = check_resumes(training(check_val_every_n_epoch=2), tmp_path, cuts=(2,))
    assert [epoch for _, epoch, _ in reports] == [2, 4]


def test_the_file_is_a_checkpoint_and_stopping_stops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = Told({2: "stop"})
    assert fit(training(min_epochs=4), tmp_path / "trial", told).kind == "pruned"
    assert [epoch for _, epoch, _ in told.reports] == [1, 2], "min_epochs does not hold it"
    module = Module.load_from_checkpoint(told.committed[0].path / "files" / "trainer.ckpt")
    with torch.no_grad():
        loss = F.cross_entropy(module.eval().net(X), Y).item()
    assert told.reports[-1][2]["val_loss"] == pytest.approx(loss)
    assert told.artifacts == {} and [path.name for path in tmp_path.iterdir()] == ["trial"], "Lightning writes nothing"


def test_stopped_early_it_stays_so_after_a_kill(tmp_path):
    """Killed between the last report and its end, it trains no epoch more."""
    function = training(callbacks=[partial(EarlyStopping, "val_loss", patience=1, min_delta=9.0)])
    whole, rest = Told(), Told()
    fit(function, tmp_path, whole)
    assert len(whole.reports) == 2
    fit(function, tmp_path, rest, whole.committed[:1])
    assert rest.reports == whole.reports[-1:]


def killed_then(function, tmp_path):
    first = Told({2: "leave"})
    fit(function, tmp_path, first)
    fit(function, tmp_path, Told(), first.committed[:1])


class Silent(Module):
    def training_step(self, batch, _):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        pass

    def on_train_epoch_end(self):
        pass


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda trial: TrialCallback(None), "TrialCallback needs the trial .* not None"),
        (training(module=Silent), "nothing to report after epoch 1: give the training data to evaluate on, or metrics"),
        (training(resume=False), "goes on after epoch 2, and this training after epoch 0: pass ckpt_path=callback"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(function, said, tmp_path):
    with pytest.raises(TrainerError, match=said):
        killed_then(function, tmp_path)


@pytest.mark.usefixtures("process")
def test_ranks_are_refused(tmp_path):
    with pytest.raises(Exception, match="TrainerError: a trial is one process, and this Trainer has 2: pass devices=1"):
        fit(training(devices=2, strategy="ddp_fork"), tmp_path, Told())
