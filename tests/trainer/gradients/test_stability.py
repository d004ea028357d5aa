"""A run with planted bad data: it diverges, or it rolls back and ends as if the data had been good."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from trainer_runs import Trial, killed_at

from trainer.data import TensorDataset
from trainer.task import Loss, Task

pytestmark = pytest.mark.whole

SAMPLES = 512
BAD = (17, 101, 230, 344)  # for a tenth of the run their targets are wrong by six orders of magnitude


class Regression(Task):
    bad: tuple[int, ...] = ()

    def data(self, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 8, generator=generator)
        w = torch.linspace(-1, 1, 8)
        return x, (x @ w).tanh()[:, None] + 0.3 * torch.randn(size, 1, generator=generator)

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        return self.net

    def train_set(self) -> TensorDataset:
        x, y = self.data(SAMPLES, 0)
        return TensorDataset(x, y, torch.arange(SAMPLES))

    def loss(self, model: nn.Module, batch) -> Loss:
        x, y, index = batch
        if 0.3 < self.progress <= 0.4:
            y = torch.where(torch.isin(index, torch.tensor(self.bad, dtype=torch.long))[:, None], 1e6, y)
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.data(2048, 1)
        return {"val/loss": ((model(x) - y) ** 2).mean().item()}


class WithBadData(Regression):
    bad = BAD


CONFIG = {
    "num_epochs": 20,
    "batch_size": 16,
    "micro_batch_size": None,
    "checkpoint": {"every_steps": 16, "keep_last": 1},
    "clip": {"norm": None},
    "optim": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
    "schedule": {"name": "cosine"},
}
ROLLBACK = {"enabled": True, "cooldown": 8, "max_rollbacks": 100}


def last(trial: Trial) -> float:
    return max((step, value) for (step, key), value in trial.reporter.values.items() if key == "val/loss")[1]


def test_bad_data_diverges_without_rollback_and_hardly_shows_with_it(tmp_path):
    clean = Trial(tmp_path / "clean", task=Regression, **CONFIG)
    assert clean.attempt().kind == "complete"

    plain = Trial(tmp_path / "plain", task=WithBadData, **CONFIG)
    ended = plain.attempt()
    assert ended.kind == "nonfinite" or not last(plain) < 10 * last(clean)

    saved = Trial(tmp_path / "saved", task=WithBadData, **CONFIG, rollback=ROLLBACK)
    assert saved.attempt().kind == "complete"
    assert abs(last(saved) / last(clean) - 1) < 0.02
    jumps = [fields for kind, fields in saved.reporter.events if kind == "loss_jumped"]
    assert len(jumps) == 2 * len(BAD)
    reports = {name: json.loads(text) for name, text in saved.reporter.artifacts}
    for jump in jumps:
        assert jump["loss"] > 1e6 > jump["usual_loss"][1]
        assert jump["grad_norm"] > jump["usual_grad_norm"][1]
        assert "back to step" in jump["action"]
        assert set(BAD) & set(reports[jump["report"]]["samples"])
    assert saved.reporter.values[max(saved.reporter.values)[0], "train/rollbacks"] == len(jumps)


def test_too_many_jumps_end_the_trial_and_say_so(tmp_path):
    trial = Trial(tmp_path, task=WithBadData, **CONFIG, rollback=ROLLBACK | {"max_rollbacks": 2})
    ended = trial.attempt()
    assert ended.kind == "nonfinite"
    assert "once more after 2 rollbacks" in ended.error
    assert "train.rollback.max_rollbacks is 2: lower train.optim.lr" in ended.error
    assert [kind for kind, _ in trial.reporter.events].count("loss_jumped") == 3


def test_a_healthy_run_is_not_touched(tmp_path):
    plain = Trial(tmp_path / "plain", task=Regression, **CONFIG)
    watched = Trial(tmp_path / "watched", task=Regression, **CONFIG, rollback=ROLLBACK)
    for trial in (plain, watched):
        assert trial.attempt().kind == "complete"
    assert [kind for kind, _ in watched.reporter.events] == []
    assert last(plain) == last(watched)
    assert math.isfinite(last(plain))


def test_the_report_says_where_it_was_and_what_was_done(tmp_path):
    trial = Trial(tmp_path, task=WithBadData, **CONFIG, rollback=ROLLBACK)
    trial.attempt()
    reports = [(name, json.loads(text)) for name, text in trial.reporter.artifacts]
    windows = SAMPLES // CONFIG["batch_size"]
    for name, report in reports:
        step = report["step"]
        assert name == f"anomalies/step-{step:08d}.json"
        assert (report["epoch"], report["window"]) == divmod(step, windows)
        assert len(report["samples"]) == CONFIG["batch_size"] and set(report["samples"]) & set(BAD)
        assert report["recent_losses"][-1] == report["previous_loss"] < report["loss"]
        assert len(report["recent_losses"]) == 16
        assert f"back to step {step // 16 * 16}" in report["action"]
        assert {one["module"] for one in report["largest_gradients"]} == {"0", "2"}
        most, least = (one["share"] for one in report["largest_gradients"])
        assert most >= least and most + least == pytest.approx(1)
    for (_, one), (_, next_one) in pairwise(reports):
        if next_one["step"] == one["step"] + 1:
            assert next_one["lr"] < one["lr"], "the learning rate is cut after the first"


def test_an_interrupted_run_reports_the_same_to_the_letter(tmp_path):
    whole = Trial(tmp_path / "whole", task=WithBadData, **CONFIG, rollback=ROLLBACK)
    whole.attempt()
    steps = [json.loads(text)["step"] for _, text in whole.reporter.artifacts]
    cut = Trial(tmp_path / "cut", task=WithBadData, **CONFIG, rollback=ROLLBACK)
    done = 0
    for step in steps[1:4]:  # killed right after a jump, so that it is met again
        assert cut.attempt(killed_at(step + 2 - done)) is None
        done = step // 16 * 16
    assert cut.attempt() is not None
    assert dict(cut.reporter.artifacts) == dict(whole.reporter.artifacts)
    assert len(cut.reporter.artifacts) >= len(steps) + 3, "jumps were met again"
    assert cut.digest() == whole.digest()


def test_a_loss_that_is_not_finite_is_reported_in_valid_json(tmp_path):
    class Infinite(WithBadData):
        def loss(self, model: nn.Module, batch) -> Loss:
            found = super().loss(model, batch)
            return Loss(found.sum * 1e38 * 1e38 if float(found.sum.detach()) > 1e6 else found.sum, found.count)

    trial = Trial(tmp_path, task=Infinite, **CONFIG, rollback=ROLLBACK)
    trial.attempt()
    _, text = trial.reporter.artifacts[0]
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["loss"] == "inf"
    assert {one["share"] for one in report["largest_gradients"]} <= {"nan", "inf"}
