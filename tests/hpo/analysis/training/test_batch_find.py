"""`hpo batch-find`: the noise scale of a task for which it is known, and the command on a real study."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hpo.analysis.training.batch_find import describe
from hpo.cli.main import app
from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.diagnose import batch_size
from trainer.diagnose.batch_size import find_batch_size
from trainer.errors import ConfigError
from trainer.memory.estimate import estimate
from trainer.task import Loss, Task


class Known(Task):
    """The loss of a sample is w x, so its gradient is x: G = (1, 1, 1, 1), tr(Sigma) = 4 * 16, noise scale 16."""

    def model(self):
        return nn.Linear(4, 1, bias=False)

    def train_set(self):
        return TensorDataset(1 + 4 * torch.randn(8192, 4))

    def loss(self, model, batch):
        (x,) = batch
        return Loss(model(x).sum(), len(x))


CONFIG = TrainConfig(batch_size=256, num_epochs=3)


def test_the_noise_scale_is_the_known_one_and_memory_grows_with_the_batch():
    found = find_batch_size(Known(None), CONFIG, steps=60)
    assert [steps for steps, _ in found.noise] == [12, 24, 36, 48, 60]
    assert all(scale == pytest.approx(16, rel=0.35) for _, scale in found.noise)
    assert (found.suggestion, found.micro_batch) == (16, None)
    sizes, peaks = zip(*found.memory, strict=True)
    assert sizes[-1] == 1024 and list(peaks) == sorted(peaks) and peaks[-1] - peaks[0] > 1000 * 4 * 4


def test_what_memory_holds_of_it_is_told():
    peaks = dict(find_batch_size(Known(None), CONFIG, steps=20).memory)
    found = find_batch_size(Known(None), CONFIG.model_copy(update={"memory_limit": peaks[16] - 1}), steps=20)
    assert (found.suggestion, found.micro_batch) == (16, 8)


def test_memory_is_that_of_the_format_it_trains_in(monkeypatch):
    seen = []

    def noted(task, config, batch):
        seen.append(config.precision)
        return estimate(task, config, batch)

    monkeypatch.setattr(batch_size, "resolved", lambda config, device: config.model_copy(update={"precision": "bf16"}))
    monkeypatch.setattr(batch_size, "estimate", noted)
    find_batch_size(Known(None), CONFIG, steps=5)
    assert CONFIG.precision == "auto" and set(seen) == {"bf16"}


class Looks(Known):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        assert loss.sum.item() < 1e9
        return loss


def test_a_loss_that_looks_at_values_has_a_noise_scale_and_no_memory():
    found = find_batch_size(Looks(None), CONFIG.model_copy(update={"memory_limit": 1}), steps=20)
    assert (found.memory, found.suggestion, found.micro_batch) == ([], 16, None)
    assert "cannot be estimated: the loss looks at values" in describe(found)


def test_a_batch_of_one_is_refused():
    with pytest.raises(ConfigError, match="give it 2 or more"):
        find_batch_size(Known(None), TrainConfig(batch_size=1))


def test_the_command_on_a_real_study():
    shown = CliRunner().invoke(app, ["batch-find", "--study", "mlp", "--steps", "30"])
    assert shown.exit_code == 0, shown.output
    assert "noise scale" in shown.stdout and "memory of a step" in shown.stdout
    assert shown.stdout == CliRunner().invoke(app, ["batch-find", "--study", "mlp", "--steps", "30"]).stdout
