"""Models with tensors of unusual kinds: expanded, sparse, complex, computed by a module, too wide for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer.config import AverageConfig, LossScaleConfig, OptimConfig
from trainer.config.optim import OPTIMIZERS
from trainer.errors import ConfigError, TrainerError
from trainer.losses import ctc
from trainer.metrics.monitor import EarlyStopping
from trainer.model.averaging import Average
from trainer.model.precision import LossScale
from trainer.optim.build import build
from trainer.report import numbers
from trainer.runtime.compare import improved


class Scaled(nn.Module):
    """6 features into 3 classes, times what `register` puts there."""

    def __init__(self, register: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        register(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def of(model: Callable[[], nn.Module]) -> type[Toy]:
    def make(task: Toy) -> nn.Module:
        task.net = model()
        return task.net

    return type("Made", (Toy,), {"model": make})


def registered(scale: torch.Tensor, **given: Any) -> type[Toy]:
    return of(lambda: Scaled(lambda module: module.register_buffer("scale", scale, **given)))


EXPANDED = {
    "buffer": registered(torch.ones(1).expand(3)),
    "parameter": of(lambda: Scaled(lambda module: setattr(module, "scale", nn.Parameter(torch.ones(1).expand(3))))),
}


@pytest.mark.parametrize("kind", EXPANDED)
def test_what_expand_has_made_trains_and_resumes(kind, tmp_path):
    trial = Trial(tmp_path / "cut", EXPANDED[kind])
    assert trial.attempt(killed_at(6)) is None
    assert trial.attempt().kind == "complete"
    assert trial.digest() == uninterrupted(tmp_path / "whole", task=EXPANDED[kind]).digest()
    assert not any(0 in tensor.stride() for tensor in trial.task.net.state_dict().values())


def test_a_buffer_of_two_modules_stays_one():
    from trainer.runtime.tensors import settle

    shared = torch.ones(1).expand(3)
    first, last = (Scaled(lambda module: module.register_buffer("scale", shared)) for _ in range(2))
    settle(nn.Sequential(first, last))
    assert first.scale is last.scale and first.scale.is_contiguous()


@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (torch.ones(3).to_sparse(), r"sparse \(sparse_coo\)"),
        (torch.ones(3, dtype=torch.complex128), "torch.complex128"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_by_name_before_training(scale, kind, tmp_path):
    trial = Trial(tmp_path, registered(scale))
    with pytest.raises(TrainerError, match=rf"^'scale' of Scaled is .*{kind}, which no checkpoint holds: keep"):
        trial.attempt()
    assert trial.reporter.values == {}


def test_what_is_not_saved_may_be_of_any_kind(tmp_path):
    made = of(lambda: Scaled(lambda m: (m.register_buffer("wide", torch.ones(3).to_sparse(), persistent=False), setattr(m, "scale", 1.0))))  # fmt: skip  # noqa: E501
    assert Trial(tmp_path, made).attempt().kind == "complete"


class Bag(Toy):
    """An embedding of the signs of the features, sparse or not."""

    sparse = False

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Embedding(2, 4, sparse=self.sparse), nn.Flatten(), nn.Linear(24, 3))
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return super().loss(model, ((x > 0).long(), y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x = torch.ones(4, 6).long().to(next(model.parameters()).device)
        return {"val/loss": F.cross_entropy(model(x), torch.zeros_like(x[:, 0])).item()}


class Sparse(Bag):
    sparse = True


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_a_sparse_embedding_trains_as_a_dense_one(name, tmp_path):
    dense, sparse = (uninterrupted(tmp_path / t.__name__, task=t, optim={"name": name}) for t in (Bag, Sparse))
    assert sparse.digest() == dense.digest()


def test_a_sparse_gradient_of_a_function_is_refused_by_name(tmp_path):
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Parameter(torch.randn(2, 4)), nn.Linear(24, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(F.embedding((x > 0).long(), self.table, sparse=True).flatten(1))

    with pytest.raises(TrainerError, match=r"^the gradient of parameter table is sparse, .* leave sparse=True out"):
        Trial(tmp_path, of(Functional)).attempt()


class Twin(nn.Module):
    def __init__(self, real: bool) -> None:
        super().__init__()
        start = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
        self.w = nn.Parameter(start if real else torch.view_as_complex(start))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters_step_as_their_real_view_or_are_refused(name):
    """The oracle is the same optimizer on the real and imaginary parts."""
    ours, oracle = Twin(real=False), Twin(real=True)
    config = OptimConfig(name=name)
    if not OPTIMIZERS[name].takes_complex:
        with pytest.raises(ConfigError, match=r"takes no complex parameters|no hidden matrix"):
            build(config, ours)
        return
    steps, whole = build(config, ours), build(config, oracle)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradient = torch.randn(4, 3, 2, generator=generator)
        ours.w.grad, oracle.w.grad = torch.view_as_complex(gradient.clone()), gradient.clone()
        steps.step()
        whole.step()
    torch.testing.assert_close(torch.view_as_real(ours.w), oracle.w, rtol=1e-6, atol=1e-7)


def test_the_fused_implementation_is_refused_for_complex_parameters():
    with pytest.raises(ConfigError, match="implementation is 'fused', which takes no complex parameters such as 'w'"):
        build(OptimConfig(name="adamw", implementation="fused"), Twin(real=False))


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(torch.complex64) @ self.w).abs())


@pytest.mark.parametrize("given", [{}, {"average": {"name": "ema"}, "clip": {"value": 0.01}}])
def test_complex_weights_train_clip_average_and_resume(given, tmp_path):
    trial = Trial(tmp_path / "cut", of(Phases), **given)
    assert trial.attempt(killed_at(6)) is None
    assert trial.attempt().kind == "complete"
    assert trial.digest() == uninterrupted(tmp_path / "whole", task=of(Phases), **given).digest()


def test_the_average_of_complex_weights_is_their_mean():
    model = Phases()
    average = Average(AverageConfig(name="swa", start=0.0), model, 3)
    seen = []
    for step in range(1, 4):
        with torch.no_grad():
            model.w += torch.randn_like(model.w)
        average.update(step)
        seen.append(model.w.detach().clone())
    torch.testing.assert_close(average.model.w.detach(), torch.stack(seen).mean(0))


def normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(6, 8))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 3))


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", [normed, parametrized])
def test_averages_of_models_that_compute_their_weights_work(kind, tmp_path):
    trial = Trial(tmp_path / "cut", of(kind), average={"name": "ema", "decay": 0.9})
    assert trial.attempt(killed_at(6)) is None
    assert trial.attempt().kind == "complete"
    whole = uninterrupted(tmp_path / "whole", task=of(kind), average={"name": "ema", "decay": 0.9})
    assert trial.digest() == whole.digest()


def test_the_average_of_weight_norm_is_that_of_its_parameters():
    model = normed()
    average = Average(AverageConfig(name="swa", start=0.0), model, 2)
    x, first = torch.randn(5, 6), [p.detach().clone() for p in model.parameters()]
    average.update(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 1.0
    average.update(2)
    oracle = normed()
    with torch.no_grad():
        for p, before in zip(oracle.parameters(), first, strict=True):
            p.copy_(before + 0.5)
    torch.testing.assert_close(average.model(x), oracle(x))


def test_a_model_that_cannot_be_copied_is_refused_in_a_sentence(tmp_path):
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(
        ConfigError, match=r"^train\.average\.name=ema keeps a second model, and Locked cannot be copied"
    ):
        Trial(tmp_path, of(lambda: Locked(6, 3)), average={"name": "ema"}).attempt()
    assert Trial(tmp_path / "none", of(lambda: Locked(6, 3))).attempt().kind == "complete"


def test_a_growing_loss_scale_stays_finite_as_torchs_does():
    for init, steps, expected in ((2e38, 1, 2e38), (65536.0, 200, 2.0**127)):
        scale = LossScale(LossScaleConfig(init=init, growth_interval=1), torch.device("cpu"))
        for _ in range(steps):
            scale.update(torch.tensor(True))
        assert scale.factor.item() == pytest.approx(expected, rel=1e-6)
        scale.update(torch.tensor(False))
        assert scale.factor.item() == pytest.approx(expected / 2, rel=1e-6)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_ctc_of_empty_targets_is_torchs(length):
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    lengths, targets, none = torch.tensor([5, 5]), torch.zeros(2, length, dtype=torch.long), torch.tensor([0, 0])
    oracle = -x.double().log_softmax(-1)[..., 0].sum()
    loss = ctc(x, targets, lengths, none)
    assert loss.sum.item() == pytest.approx(oracle.item(), rel=1e-6) and float(loss.count) == 2
    loss.sum.backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_the_best(mode, value):
    assert not improved(value, None, mode) and not improved(value, 1.0, mode)
    from trainer.config import EarlyStoppingConfig

    watched = EarlyStopping(EarlyStoppingConfig(monitor="val/loss", mode=mode, patience=2))
    for one in (value, 1.0, value, value):
        watched.update(one)
    assert (watched.best, watched.stopped) == (1.0, True)


def test_a_metric_too_large_for_a_float_is_refused_by_its_name(tmp_path):
    class Huge(Toy):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"val/loss": 0.5, "val/big": 10**400}

    with pytest.raises(TrainerError, match=r"gave 'val/big' the value 1000.*: it is too large for a float"):
        Trial(tmp_path, Huge).attempt()
    with pytest.raises(ValueError, match=r"metric 'val/big' is 1000.*, which is too large for a float"):
        numbers({"val/big": 10**400})
