"""What `fit` trains, reports, refuses and survives."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from places import ROOT
from rounds import rounds
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import Killed, Toy, Trial, killed_at, uninterrupted

from trainer import step
from trainer.config.optim import OPTIMIZERS
from trainer.data import TensorDataset
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.report import Verdict
from trainer.runtime.seeding import derive, seed_all, shuffled
from trainer.task import Loss, Task

pytestmark = pytest.mark.whole


class Plain(Toy):
    """Nothing drawn while it trains, so that a loop by hand can follow."""

    augment = Task.augment

    def model(self):
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        return self.net


class At(Plain):
    """Changes the loss of some steps: `change(step, model, loss) -> Loss`. The step is known by its seed."""

    change = staticmethod(lambda step, model, loss: loss)

    def loss(self, model, batch):
        seeds = {derive(0, "step", step, 0): step for step in range(12)}
        step = seeds.get(torch.initial_seed(), -1)
        return type(self).change(step, model, super().loss(model, batch))


def changing(change) -> type[At]:
    return type("Changed", (At,), {"change": staticmethod(change)})


def bad_at(*steps: int, value: float = math.nan) -> type[At]:
    return changing(lambda step, model, loss: Loss(loss.sum * (value if step in steps else 1.0), loss.count))


def curve(trial: Trial, key: str) -> list[float]:
    return [value for (_, k), value in sorted(trial.reporter.values.items()) if k == key]


def test_equals_the_loop_written_by_hand(tmp_path):
    trial = uninterrupted(
        tmp_path, task=Plain, micro_batch_size=None, num_epochs=3, optim={"lr": 0.01, "weight_decay": 0.1}
    )
    seed_all(derive(0, "init"))
    net = Plain(None).model()
    seed_all(derive(0, "data"))
    x, y = Plain(None).train_set()._tensors
    optimizer = torch.optim.AdamW(
        [{"params": [net[0].weight, net[2].weight]}, {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0}],
        lr=0.01,
        weight_decay=0.1,
    )
    losses, norms = [], []
    for epoch in range(3):
        total, epoch_norms = 0.0, []
        for rows in torch.tensor(shuffled(0, epoch, 44)).split(12):
            optimizer.zero_grad()
            loss = cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            epoch_norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / 44)
        norms.append(sum(epoch_norms) / 4)
    for p, q in zip(trial.task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert curve(trial, "train/loss") == pytest.approx(losses, rel=1e-5)
    assert curve(trial, "train/grad_norm") == pytest.approx(norms, rel=1e-5)


def test_what_is_reported_at_the_end_of_each_epoch(tmp_path):
    trial = uninterrupted(tmp_path, checkpoint={"every_steps": 3})
    assert trial.reporter.epochs == {4: 1, 8: 2}
    assert {key for step, key in trial.reporter.values if step == 4} == {
        "train/loss",
        "train/right",
        "train/lr",
        "train/grad_norm",
        "train/clipped",
        "train/parameters",
        "train/samples_per_sec",
        "train/skipped_steps",
        "train/empty_steps",
        "val/loss",
        "time/checkpoint_seconds",
        "time/data_share",
        "time/epoch_seconds",
    }
    assert trial.reporter.values[4, "train/parameters"] == sum(p.numel() for p in trial.task.net.parameters())
    assert {step for step, _ in trial.reporter.values} == {4, 8}
    assert [(ref.step, ref.epoch) for ref in trial.reporter.committed] == [(8, 2), (6, 1)]
    assert not trial.reporter.events


class Slow(Plain):
    """Reading a batch takes longer than training on it."""

    def train_set(self):
        class Data(TensorDataset):
            def __getitems__(self, indices):
                time.sleep(0.05)
                return super().__getitems__(indices)

        return Data(*super().train_set()[:])


def test_the_share_of_an_epoch_that_waits_for_data(tmp_path):
    fast, slow = (uninterrupted(tmp_path / task.__name__, task=task) for task in (Plain, Slow))
    assert all(0 < share < 0.5 for share in curve(fast, "time/data_share"))
    assert all(0.5 < share < 1 for share in curve(slow, "time/data_share"))


def test_the_noise_scale_is_reported_each_epoch_and_changes_nothing(tmp_path):
    plain = uninterrupted(tmp_path / "plain", micro_batch_size=3)
    measured = uninterrupted(tmp_path / "measured", micro_batch_size=3, gradients={"noise_scale": True})
    found = curve(measured, "train/noise_scale")
    assert len(found) == 2 and all(math.isnan(value) or value > 0 for value in found)
    assert curve(measured, "train/loss") == curve(plain, "train/loss")


def test_a_scaled_loss_leaves_the_noise_scale_as_it_is(tmp_path):
    def found(precision: str, **scale: object) -> list[float]:
        given = {"micro_batch_size": 3, "gradients": {"noise_scale": True}, "precision": precision, **scale}
        return curve(uninterrupted(tmp_path / f"{precision}{scale}", **given), "train/noise_scale")

    scales = ({"loss_scale": {"dynamic": False, "init": float(2**power)}} for power in (3, 8))
    exact = found("fp32")
    for scale in scales:
        assert found("fp16", **scale) == pytest.approx(exact, rel=0.02, nan_ok=True)


class FullOnce(Plain):
    """In its third window, memory runs out after two of the three micro-batches, once."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(model, batch)


def test_gradients_from_before_memory_ran_out_are_no_part_of_the_window(tmp_path):
    """Though the probe of their noise has put them aside."""
    trials = [
        uninterrupted(tmp_path / task.__name__, task=task, micro_batch_size=4, gradients={"noise_scale": True})
        for task in (Plain, FullOnce)
    ]
    assert [kind for kind, _ in trials[1].reporter.events] == ["out_of_memory"]
    for p, q in zip(*(trial.task.net.parameters() for trial in trials), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_an_average_takes_in_no_skipped_window_on_a_device_either(name, tmp_path, monkeypatch):
    given = {"task": bad_at(0, 5), "average": {"name": name, "start": 0.0}, "micro_batch_size": None}
    here = uninterrupted(tmp_path / "here", **given)
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: True)
    there = uninterrupted(tmp_path / "there", **given)
    assert curve(there, "train/skipped_steps") == [1, 1]
    assert curve(there, "val/loss") == pytest.approx(curve(here, "val/loss"), rel=1e-6)


def test_a_schedule_and_a_batch_size_rule_reach_the_optimizer(tmp_path):
    """The last of 8 updates is number 7: 1/8 of the peak, which is sqrt(12/48) of the one given."""
    schedule = {"name": "linear", "scale_lr": "sqrt", "base_batch_size": 48}
    trial = uninterrupted(tmp_path, batch_size=12, optim={"lr": 0.01}, schedule=schedule)
    assert curve(trial, "train/lr")[-1] == pytest.approx(0.01 * 0.5 / 8)


def test_bf16_trains_and_differs_from_fp32(tmp_path):
    fp32, bf16 = (uninterrupted(tmp_path / p, task=Plain, precision=p, num_epochs=4) for p in ("fp32", "bf16"))
    a, b = curve(fp32, "train/loss"), curve(bf16, "train/loss")
    assert a != b
    assert a == pytest.approx(b, rel=0.02)
    assert all(p.dtype == torch.float32 for p in bf16.task.net.parameters())


# The guard


OPTIMS = {name: {"name": name} for name in OPTIMIZERS}
OPTIMS |= {f"sgd in {wrap}": {"name": "sgd", "wrap": wrap} for wrap in ("lookahead", "sam")}
OPTIMS["sgd in lookahead"]["lookahead"] = {"k": 2}
OPTIMS["sophia"]["update_every"] = 2
ON_DEVICE = ("sgd", "adam", "adamw", "sgd in sam")


@pytest.mark.parametrize(
    ("given", "on_device"), [(given, False) for given in OPTIMS] + [(given, True) for given in ON_DEVICE]
)
def test_a_step_that_is_not_finite_never_reaches_the_weights(given, on_device, tmp_path, monkeypatch):
    """As if its window had been empty; also where the decision is the device's, as on a GPU."""
    results = {}
    empty = changing(lambda step, model, loss: Loss(loss.sum * 0, 0) if step in (0, 5) else loss)
    for name, task, deferred in (("empty", empty, False), ("bad", bad_at(0, 5), on_device)):
        monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device, deferred=deferred: deferred)
        of = {"optim": OPTIMS[given], "micro_batch_size": None, "checkpoint": {"every_steps": None}}
        trial = uninterrupted(tmp_path / name, task=task, **of)
        results[name] = [p.detach().clone() for p in trial.task.net.parameters()]
    for p, q in zip(results["bad"], results["empty"], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0 if not on_device else 1e-7)
    assert curve(trial, "train/skipped_steps") == [1, 1]
    assert [(kind, fields["step"]) for kind, fields in trial.reporter.events] == [("skipped_step", n) for n in (0, 5)]
    assert all(math.isfinite(loss) for loss in curve(trial, "train/loss"))


@pytest.mark.parametrize("warmup", [1, 1000])
def test_a_warmup_that_outlasts_the_run_is_an_event_once(warmup, tmp_path):
    trial = uninterrupted(tmp_path, task=Plain, num_epochs=2, schedule={"warmup_steps": warmup})
    trial.attempt()  # which has nothing left to train
    told = [fields for kind, fields in trial.reporter.events if kind == "warmup_not_over"]
    assert [one["step"] for one in told] == ([0] if warmup == 1000 else [])


class BadInThePass(Plain):
    """The loss is not finite in the window of step 0, in the pass of that number alone."""

    number = 0

    def loss(self, model, batch):
        self.passes = getattr(self, "passes", -1) + 1
        loss = super().loss(model, batch)
        return Loss(loss.sum * (math.nan if self.passes == self.number else 1.0), loss.count)


@pytest.mark.parametrize("given", [{"name": "sgd", "wrap": "sam"}, {"name": "sophia"}])
@pytest.mark.parametrize("number", [0, 1])
def test_either_pass_of_two_can_skip_the_window(given, number, tmp_path):
    """SAM's at the perturbed weights, and Sophia's for the curvature: nothing moves, and it is counted."""
    task = type("Bad", (BadInThePass,), {"number": number, "samples": 12})
    trial = uninterrupted(tmp_path, task=task, num_epochs=1, micro_batch_size=None, optim=given)
    assert curve(trial, "train/skipped_steps") == [1]
    assert trial.task.passes == 1
    seed_all(derive(0, "init"))
    for p, q in zip(trial.task.net.parameters(), Plain(None).model().parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_a_skipped_window_leaves_batch_norms_statistics_alone(empty, on_device, tmp_path, monkeypatch):
    """The first window is skipped, so the statistics after it are those that it found."""
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: on_device)

    class Bad(Toy):
        samples = 12

        def loss(self, model, batch):
            x, y = batch
            loss = super().loss(model, (x if empty else x * math.nan, y))
            return Loss(loss.sum, 0) if empty else loss

    trial = uninterrupted(tmp_path, task=Bad, num_epochs=1)
    norm = trial.task.net[1]
    assert torch.equal(norm.running_mean, torch.zeros(12))
    assert torch.equal(norm.running_var, torch.ones(12))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("on_device", [False, True])
def test_too_many_in_a_row_end_the_fit(on_device, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: on_device)
    trial = Trial(tmp_path, task=bad_at(1, 3, 4, 5, value=math.inf), guard={"max_consecutive": 3}, num_epochs=3)
    outcome = trial.attempt()
    assert outcome.kind == "nonfinite"
    assert outcome.step == 6  # where the numbers are read every third step, too
    assert "3 steps in a row" in outcome.error


@pytest.mark.parametrize("average", ["none", "ema", "swa"])
def test_the_device_is_waited_for_no_more_often_than_is_reported(average, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: True)
    plain = {"micro_batch_size": None, "checkpoint": {"every_epochs": None}, "average": {"name": average, "start": 0.0}}
    trial = Trial(tmp_path, task=Plain, num_epochs=6, **plain)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert trial.attempt().step == 24
    reads = [event for event in profile.events() if event.name == "aten::_local_scalar_dense"]
    ours = [event for event in reads if event.cpu_parent.cpu_parent is None]  # the CPU's fused kernel reads its flag
    assert len(ours) <= len(trial.reporter.epochs) == 6


def poison(what: str):
    def change(step, model, loss):
        if step < 2:
            return loss
        if what == "parameter":
            model[2].weight.data[0, 0] = math.nan
        out = model(torch.full((2, 6), 1e30) * 1e30 if what == "module" else torch.ones(2, 6))
        return Loss((out * (math.nan if what == "loss" else 1.0)).sum(), 2)

    return changing(change)


@rounds(
    ("what", "named"),
    [
        ("parameter", "parameter 2.weight is not finite"),
        ("module", "output of module 0 is the first"),
        ("loss", "the loss gives a gradient that is not finite"),
    ],
)
def test_the_first_bad_thing_is_named(what, named, tmp_path):
    outcome = Trial(tmp_path, task=poison(what), guard={"max_consecutive": 2}).attempt()
    assert (outcome.kind, outcome.step) == ("nonfinite", 4)
    assert named in outcome.error


def test_empty_windows_are_skipped_counted_and_no_reason_to_give_up(tmp_path):
    task = changing(lambda step, model, loss: Loss(loss.sum * 0, torch.tensor(0)))
    trial = Trial(tmp_path, task=task, guard={"max_consecutive": 1})
    outcome = trial.attempt()
    assert outcome.step == 8
    assert outcome.kind == "nonfinite" and "8 had nothing to learn from" in outcome.error
    assert curve(trial, "train/empty_steps") == [4, 4]
    assert all(math.isnan(loss) for loss in curve(trial, "train/loss"))
    seed_all(derive(0, "init"))
    for p, q in zip(trial.task.net.parameters(), Plain(None).model().parameters(), strict=True):
        assert torch.equal(p, q)


# Optimizers


@pytest.mark.parametrize("given", OPTIMS)
def test_every_optimizer_fits(given, tmp_path):
    optim = OPTIMS[given] | {"weight_decay": 0.0}
    given = {"task": Plain, "optim": optim, "micro_batch_size": None, "checkpoint": {"every_epochs": 12}}
    trial = uninterrupted(tmp_path, num_epochs=12, **given)
    losses = curve(trial, "train/loss")
    assert losses[-1] < losses[0] - 0.005
    assert curve(trial, "train/skipped_steps") == [0] * 12


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_equals_the_loop_written_by_hand(adaptive, tmp_path):
    """Foret et al. 2021, algorithm 1, over windows of micro-batches with clipping; ASAM likewise."""
    optim = {"name": "sgd", "lr": 0.5, "wrap": "sam", "sam": {"rho": 0.3, "adaptive": adaptive}}
    trial = uninterrupted(tmp_path, task=Plain, num_epochs=3, optim=optim, clip={"norm": 0.5})
    seed_all(derive(0, "init"))
    net = Plain(None).model()
    seed_all(derive(0, "data"))
    x, y = Plain(None).train_set()._tensors
    velocity = [torch.zeros_like(p) for p in net.parameters()]
    for epoch in range(3):
        for rows in torch.tensor(shuffled(0, epoch, 44)).split(12):

            def gradient(rows=rows):
                return torch.autograd.grad(cross_entropy(net(x[rows]), y[rows]), list(net.parameters()))

            before = [p.detach().clone() for p in net.parameters()]
            scale = [p.abs() if adaptive else torch.ones_like(p) for p in before]
            g = gradient()
            norm = sum((s * d).square().sum() for s, d in zip(scale, g, strict=True)).sqrt()
            with torch.no_grad():
                for p, s, d in zip(net.parameters(), scale, g, strict=True):
                    p += 0.3 * s * s * d / norm
            g = gradient()
            total = sum(d.square().sum() for d in g).sqrt()
            with torch.no_grad():
                for p, w, d, v in zip(net.parameters(), before, g, velocity, strict=True):
                    v.mul_(0.9).add_(d * min(1.0, 0.5 / total) + (1e-4 * w if w.ndim > 1 else 0))
                    p.copy_(w - 0.5 * v)
    for p, q in zip(trial.task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_sams_second_pass_keeps_dropout_and_leaves_batch_norm_alone(tmp_path):
    seen = []

    class Watched(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            seen.append((torch.rand(3).tolist(), model[1].num_batches_tracked.item()))
            return loss

    uninterrupted(tmp_path, task=Watched, num_epochs=1, optim={"wrap": "sam"})
    first, again = seen[:3], seen[3:6]  # a window of three micro-batches
    assert [draws for draws, _ in first] == [draws for draws, _ in again]
    assert [count for _, count in seen[:7]] == [1, 2, 3, 4, 5, 6, 4]


def test_the_reported_learning_rate_is_that_of_scale_one(tmp_path):
    trial = uninterrupted(tmp_path, task=Plain, optim={"lr": 0.3, "layer_decay": 0.1})
    assert curve(trial, "train/lr") == [0.3, 0.3]


# Rules that watch the curve


class Scripted(Plain):
    """`val/score` by epoch, as given."""

    scores = (1.0, 2.0, 2.5, 2.4, 2.0, 3.0, 1.0, 1.0)

    def evaluate(self, model):
        self.calls = getattr(self, "calls", -1) + 1
        return {"val/score": self.scores[self.calls]}


def test_early_stopping_counts_epochs_without_improvement(tmp_path):
    stopping = {"monitor": "val/score", "mode": "max", "patience": 2}
    trial = Trial(tmp_path, task=Scripted, num_epochs=8, early_stopping=stopping)
    outcome = trial.attempt()
    assert (outcome.kind, outcome.epoch) == ("complete", 5)
    trial = Trial(tmp_path / "delta", task=Scripted, num_epochs=8, early_stopping=stopping | {"min_delta": 0.6})
    assert trial.attempt().epoch == 4


class ScriptedNan(Scripted):
    scores = (1.0, math.nan, 2.0)


@pytest.mark.parametrize(
    ("task", "mode", "bound", "epoch"),
    [(Scripted, "min", 2.4, 3), (Scripted, "min", 2.5, 6), (Scripted, "max", 1.5, 1), (ScriptedNan, "max", 0.5, 2)],
)
def test_a_value_beyond_the_bound_diverged_though_a_kill_follows(tmp_path, task, mode, bound, epoch):
    def die(step: int) -> None:
        if trial.reporter.epochs.get(step) == epoch:
            raise Killed

    stopping = {"monitor": "val/score", "mode": mode, "divergence": bound}
    trial = Trial(tmp_path, task=task, num_epochs=8, early_stopping=stopping)
    trial.reporter.after_commit = die
    assert trial.attempt() is None
    trial.reporter.after_commit = lambda step: None
    outcome = trial.attempt()
    assert (outcome.kind, outcome.epoch) == ("nonfinite", epoch)
    value = f"{task.scores[epoch - 1]:.4g}"
    assert outcome.error == f"val/score came to {value}, beyond train.early_stopping.divergence={bound:g}."


def test_plateau_scales_the_learning_rate(tmp_path):
    plateau = {"monitor": "val/score", "mode": "max", "patience": 0, "factor": 0.5, "min_lr": 0.3}
    trial = Trial(
        tmp_path,
        task=Scripted,
        num_epochs=8,
        optim={"lr": 1.0},
        schedule={"name": "plateau", "plateau": plateau},
    )
    trial.attempt()
    assert curve(trial, "train/lr") == [1.0, 1.0, 1.0, 1.0, 0.5, 0.3, 0.3, 0.3]


def test_the_best_checkpoint_is_kept_over_attempts(tmp_path):
    keep = {"every_steps": None, "keep_last": 1, "monitor": "val/score", "mode": "max"}
    pause = lambda step, metrics, epoch: Verdict("pause" if epoch == 4 else "continue")  # noqa: E731
    trial = Trial(tmp_path, task=Scripted, num_epochs=5, checkpoint=keep, verdict=pause)
    assert trial.attempt().kind == "paused"
    trial.reporter.decisions.clear()
    trial.reporter.verdict = None
    assert trial.attempt().kind == "complete"
    assert [ref.epoch for ref in trial.reporter.committed] == [5, 3]
    assert {path.name for path in tmp_path.iterdir()} == {ref.path.name for ref in trial.reporter.committed}


@rounds(
    ("config", "field"),
    [
        ({"early_stopping": {"monitor": "val/los"}}, "early_stopping.monitor"),
        ({"schedule": {"name": "plateau", "plateau": {"monitor": "val/los"}}}, "schedule.plateau.monitor"),
        ({"checkpoint": {"monitor": "val/los"}}, "checkpoint.monitor"),
    ],
)
def test_a_metric_nobody_reports_is_refused(config, field, tmp_path):
    with pytest.raises(ConfigError, match=rf"train\.{field} is 'val/los'.*train/loss, .*val/loss"):
        Trial(tmp_path, **config).attempt()


# Faults


def test_out_of_memory_is_an_outcome(tmp_path):
    def change(step, model, loss):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        return loss

    outcome = Trial(tmp_path / "gpu", task=changing(change)).attempt()
    assert (outcome.kind, outcome.step) == ("out_of_memory", 2)
    assert outcome.error == "out of memory: CUDA out of memory. Tried to allocate 2 GiB."
    cpu = changing(lambda step, model, loss: torch.empty(2**48))
    assert Trial(tmp_path / "cpu", task=cpu).attempt().kind == "out_of_memory"

    class TooLarge(Plain):
        def model(self):
            return nn.Linear(2**30, 2**20)

    assert Trial(tmp_path / "model", task=TooLarge).attempt().kind == "out_of_memory"


def test_a_bug_in_the_task_comes_through_and_leaves_the_process_clean(tmp_path):
    def change(step, model, loss):
        raise ZeroDivisionError("bug")

    def settings():
        filling = torch.utils.deterministic.fill_uninitialized_memory
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), filling

    before = settings()
    with pytest.raises(ZeroDivisionError, match="bug"):
        Trial(tmp_path, task=changing(change), num_threads=before[0] + 1).attempt()
    assert settings() == before


def test_a_detached_loss_and_a_missing_gpu_are_refused(tmp_path):
    with pytest.raises(TrainerError, match="without a gradient"):
        Trial(tmp_path, task=changing(lambda step, model, loss: Loss(loss.sum.detach(), loss.count))).attempt()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"train\.device is 'cuda'"):
            Trial(tmp_path, device="cuda").attempt()


class NoData(Plain):
    def train_set(self):
        return TensorDataset(torch.zeros(0, 6), torch.zeros(0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's own
def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    with pytest.raises(ConfigError, match=r"train\.compile needs a C\+\+ compiler: install"):
        Trial(tmp_path, compile=True).attempt()


def test_an_empty_training_set_is_refused(tmp_path):
    with pytest.raises(DataError, match="training set of NoData is empty: give it one"):
        Trial(tmp_path, task=NoData).attempt()


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_cost_time_and_nothing_else(damaged, tmp_path):
    expected = uninterrupted(tmp_path / "whole").digest()
    trial = Trial(tmp_path / "damaged")
    trial.attempt(killed_at(7))
    for ref in trial.reporter.committed[:damaged]:
        (ref.path / "model.safetensors").write_bytes(b"")
    assert trial.attempt().kind == "complete"
    assert trial.digest() == expected
    kinds = [kind for kind, _ in trial.reporter.events]
    assert kinds == ["checkpoint_damaged"] * damaged + ["restarted_from_scratch"] * (damaged == 2)
    first = trial.reporter.events[0][1]
    assert first["reason"].startswith("model.safetensors has 0 bytes instead of")
    assert (first["step"], first["path"].endswith(".corrupt")) == (6, True)


# Starting from a checkpoint of the user's


@pytest.fixture
def trained(tmp_path) -> tuple[Trial, Path]:
    trial = uninterrupted(tmp_path / "trained", task=Plain)
    return trial, trial.reporter.committed[0].path


def test_resume_from_continues_where_the_other_run_ended(trained, tmp_path):
    longer = uninterrupted(tmp_path / "longer", task=Plain, num_epochs=4)
    trial = uninterrupted(tmp_path / "more", task=Plain, num_epochs=4, resume_from=trained[1])
    assert trial.reporter.epochs == {12: 3, 16: 4}
    for p, q in zip(trial.task.net.parameters(), longer.task.net.parameters(), strict=True):
        assert torch.equal(p, q)


@rounds(
    ("changes", "error", "says"),
    [
        ({"num_epochs": 2}, ConfigError, "has trained 2 epochs and train.num_epochs is 2"),
        ({"task": Toy}, ConfigError, "the checkpoint holds another model than the configuration's: keep that model"),
        ({"resume_from": "/nowhere"}, ConfigError, r"/nowhere cannot be used: manifest\.json is missing"),
    ],
)
def test_resume_from_refuses_what_does_not_fit(changes, error, says, trained, tmp_path):
    given = {"task": Plain, "num_epochs": 4, "resume_from": trained[1]} | changes
    with pytest.raises(error, match=says) as raised:
        Trial(tmp_path / "more", **given).attempt()
    assert "\n" not in str(raised.value)


def test_resume_from_inside_an_epoch_needs_the_same_windows(tmp_path):
    trial = Trial(tmp_path / "cut", task=Plain)
    trial.attempt(killed_at(7))
    inside = {"task": Plain, "resume_from": trial.reporter.committed[0].path}
    with pytest.raises(ConfigError, match="inside an epoch of 4 steps, and this configuration's has 6"):
        Trial(tmp_path / "other", **inside, batch_size=8).attempt()


# The package


@pytest.mark.usefixtures("process")
def test_the_trainer_runs_alone_and_its_contracts_without_torch():
    code = """
import sys
import trainer.config, trainer.report, trainer.errors, trainer.runtime.failpoint
assert "torch" not in sys.modules and "numpy" not in sys.modules
import trainer.loop
alien = {"hpo", "studies", "optuna", "mlflow", "ray", "sqlalchemy"} & set(sys.modules)
assert not alien, alien
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_global_generators_do_not_matter_before_and_are_seeded_after(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    one = uninterrupted(tmp_path / "one").digest()
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert uninterrupted(tmp_path / "two").digest() == one


def test_a_loss_that_is_a_bare_tensor_is_refused_by_name(tmp_path):
    class Bare(Toy):
        def loss(self, model, batch):
            return super().loss(model, batch).sum

    said = r"loss\(\) of Bare \(test_loop\.py:\d+\) returned a Tensor: return Loss\(sum, n\), .* Loss\(mean \*"
    with pytest.raises(TrainerError, match=said):
        Trial(tmp_path, Bare).attempt()


@rounds(("summed", "odd"), [(lambda sum: sum.expand(3), r"of shape \(3,\)"), (torch.Tensor.item, "float")])
def test_a_loss_that_is_not_one_tensor_of_one_number_is_refused(tmp_path, summed, odd):
    class Several(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return Loss(summed(loss.sum), loss.count)

    with pytest.raises(TrainerError, match=rf"loss\(\) of Several .* a Loss whose sum is {odd}: .*losses\.sum\(\)"):
        Trial(tmp_path, Several).attempt()


@rounds("part", ["count", "terms"])
def test_the_other_numbers_of_a_loss_are_one_each(tmp_path, part):
    class Several(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return replace(loss, **{part: torch.ones(3) if part == "count" else {"part": torch.ones(3)}})

    with pytest.raises(TrainerError, match=r"a Loss whose (count|term 'part') is of shape \(3,\)"):
        Trial(tmp_path, Several).attempt()


def test_a_loss_of_one_number_in_a_list_is_that_number(tmp_path):
    class Listed(Plain):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return Loss(loss.sum.reshape(1), torch.tensor([float(loss.count)]), {"half": loss.sum.reshape(1) / 2})

    plain, listed = (uninterrupted(tmp_path / task.__name__, task=task) for task in (Plain, Listed))
    assert curve(listed, "train/loss") == curve(plain, "train/loss")
    assert curve(listed, "train/half") == pytest.approx([loss / 2 for loss in curve(plain, "train/loss")])


def test_a_model_that_is_not_returned_is_refused(tmp_path):
    class Forgotten(Toy):
        def model(self):
            super().model()

    with pytest.raises(TrainerError, match=r"model\(\) of Forgotten .* returned a NoneType: return the nn\.Module"):
        Trial(tmp_path, Forgotten).attempt()


@rounds(
    ("given", "said"),
    [
        (None, r"evaluate\(\) of Odd \(test_loop\.py:\d+\) returned a NoneType: return numbers by name"),
        ({"val/loss": torch.zeros(2)}, r"evaluate\(\) of Odd .* gave 'val/loss' a Tensor that is not a number"),
        ({"val/loss": "0.5"}, r"gave 'val/loss' a str that is not a number \(it is text\): return one for each name"),
        ({0: 0.5}, r"evaluate\(\) of Odd .* gave a value the name 0: name it by text, '0'\."),
        ({"val/loss": "low"}, r"gave 'val/loss' a str that is not a number .*: return one for each name"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused(tmp_path, given, said):
    class Odd(Toy):
        def evaluate(self, model):
            return given

    with pytest.raises(TrainerError, match=said):
        Trial(tmp_path, Odd).attempt()


def test_a_loss_that_is_summed_up_in_bf16_is_refused(tmp_path):
    class Rounded(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return Loss(loss.sum.bfloat16(), loss.count)

    with pytest.raises(TrainerError, match=r"summed up in bfloat16, which rounds: .*output\.float\(\)"):
        Trial(tmp_path, Rounded, precision="bf16").attempt()


def test_fp16_finds_its_scale_and_counts_what_is_lost(tmp_path):
    trial = uninterrupted(tmp_path, precision="fp16", loss_scale={"init": 2.0**23, "growth_interval": 1000})
    values = trial.reporter.values
    skipped = sum(value for (_, key), value in values.items() if key == "train/skipped_steps")
    assert skipped > 0 and values[8, "train/loss_scale"] == 2.0 ** (23 - skipped)
    assert 0 <= values[8, "train/underflow"] < 1
    fp32 = uninterrupted(tmp_path / "fp32")
    assert values[8, "train/loss"] == pytest.approx(fp32.reporter.values[8, "train/loss"], rel=0.2)


class OfTokens(Plain):
    """Each sample's loss counts 4096 of them, so that its sum is as much larger than fp16's scale allows for."""

    def loss(self, model, batch):
        return super().loss(model, batch).times(4096)


@pytest.mark.parametrize("on_device", [False, True])
def test_overflows_that_only_halve_fp16s_scale_do_not_end_a_fit(on_device, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: on_device)
    given = {"task": OfTokens, "num_epochs": 4, "guard": {"max_consecutive": 2}, "micro_batch_size": None}
    trial = Trial(tmp_path, precision="fp16", **given)
    assert trial.attempt().kind == "complete"
    skipped = sum(curve(trial, "train/skipped_steps"))
    assert skipped > 2 and curve(trial, "train/loss_scale")[-1] == 2.0 ** (16 - skipped)
    assert all(p.isfinite().all() for p in trial.task.net.parameters())


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("what", "scale", "steps"),
    [
        ("gradient", {"init": 32.0}, 4 + 3),  # 32 to 4 are answered, 2 to 0.5 are not
        ("gradient", {"init": 32.0, "dynamic": False}, 3),
        ("loss", {"init": 32.0}, 3),  # no scale mends that
    ],
)
def test_what_is_never_finite_ends_an_fp16_fit_and_leaves_the_weights(
    what, scale, steps, on_device, tmp_path, monkeypatch
):
    def change(step, model, loss):
        zero = (model[2].weight * 0).sum()
        return Loss(loss.sum + (zero.sqrt() if what == "gradient" else zero / zero), loss.count)

    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: on_device)
    given = {"guard": {"max_consecutive": 3}, "num_epochs": 4, "micro_batch_size": None, "precision": "fp16"}
    trial = Trial(tmp_path, task=changing(change), loss_scale=scale, **given)
    outcome = trial.attempt()
    assert outcome.kind == "nonfinite"
    assert steps <= outcome.step < steps + (3 if on_device else 1), "read every third step"
    seed_all(derive(0, "init"))
    for p, q in zip(trial.task.net.parameters(), Plain(None).model().parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_no_step_trained_on_is_infeasible_however_few_they_are(on_device, micro_batch_size, tmp_path, monkeypatch):
    """Three steps, fewer than the guard's ten in a row: what is left is the model as it was made."""
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: on_device)
    given = {"task": bad_at(*range(3)), "num_epochs": 3, "batch_size": 44, "micro_batch_size": micro_batch_size}
    outcome = Trial(tmp_path / "none", **given).attempt()
    assert (outcome.kind, outcome.step) == ("nonfinite", 3)
    assert outcome.error.startswith("none of the 3 steps was trained on: in 3 the loss or gradient was not finite")
    assert Trial(tmp_path / "one", **given | {"task": bad_at(0, 1)}).attempt().kind == "complete"


@pytest.mark.parametrize("cut", [2, 4, 5])
def test_an_interrupted_trial_counts_the_steps_of_all_its_attempts(cut, tmp_path):
    for name, task, kind in (("none", bad_at(*range(8)), "nonfinite"), ("first", bad_at(*range(1, 8)), "complete")):
        trial = Trial(tmp_path / name, task=task)
        assert trial.attempt(killed_at(cut)) is None
        assert trial.attempt().kind == kind


def test_what_a_strategy_stops_untrained_is_infeasible_too(tmp_path):
    trial = Trial(tmp_path, task=bad_at(*range(8)), verdict=lambda step, metrics, epoch: Verdict("stop", step))
    assert trial.attempt().kind == "nonfinite"


def test_a_trial_that_starts_from_anothers_weights_has_to_train_too(tmp_path):
    other = uninterrupted(tmp_path / "other", task=Plain, num_epochs=1)
    start = str(other.reporter.committed[0].path)
    trial = Trial(tmp_path / "trial", task=bad_at(*range(8)), resume_from=start)
    assert trial.attempt().error.startswith("none of the 4 steps was trained on")


def test_the_average_is_what_is_evaluated(tmp_path):
    plain, ema = uninterrupted(tmp_path / "a"), uninterrupted(tmp_path / "b", average={"name": "ema", "decay": 0.9})
    for key in ("train/loss", "train/grad_norm"):
        assert plain.reporter.values[8, key] == ema.reporter.values[8, key]
    assert plain.reporter.values[8, "val/loss"] != ema.reporter.values[8, "val/loss"]
