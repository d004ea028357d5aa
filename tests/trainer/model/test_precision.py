"""Number formats: fp32 where it must be fp32, torch's loss scaling, float8 by torchao."""

from __future__ import annotations

import enum
import logging

import pytest
import torch
from torch import nn

from trainer.config import LossScaleConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.model.precision import LossScale, autocast, check_float8, prepare, resolved, underflow
from trainer.runtime.quiet_imports import quiet_torchao

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_normalisation_computes_in_fp32_under_autocast(precision):
    norms = [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.RMSNorm(8)]
    model = prepare(nn.Sequential(nn.Linear(8, 8), *norms), precision)
    seen = []
    for norm in norms:
        norm.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with autocast(precision, CPU):
        model(torch.randn(4, 8))
    assert seen == [(torch.float32, torch.float32)] * 3


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_weights_and_gradients_stay_fp32(precision):
    if precision == "fp8":
        pytest.importorskip("torchao", reason="runs with pip install -e '.[fp8]'")
    model = prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), precision)
    with autocast(precision, CPU):
        model(torch.randn(16, 16)).float().square().sum().backward()
    for p in model.parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None and p.grad.dtype == torch.float32


def test_torchaos_enum_warning_is_silenced_and_all_else_is_heard():
    class Kind(enum.Enum):
        ONE = 1

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return 1

    heard: list[str] = []
    logger, handler = logging.getLogger("torch.utils._pytree"), logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    quiet_torchao()
    try:
        torch.utils._pytree.register_constant(Kind)
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert heard == ["something else"]


def test_loss_scale_moves_as_torchs_grad_scaler_does():
    pattern = [True] * 3 + [False, True, False, False] + [True] * 7
    ours = LossScale(LossScaleConfig(init=1024.0, growth_interval=3), CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in pattern:
        theirs.scale(torch.ones(1))  # makes its tensors at the first call
        weight.grad = torch.tensor([1.0 if finite else torch.inf])
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(finite))
        assert ours.factor.item() == theirs.get_scale()


def test_a_static_loss_scale_stays():
    scale = LossScale(LossScaleConfig(init=128.0, dynamic=False), CPU)
    scale.update(torch.tensor(False))
    assert scale.factor.item() == 128.0


def test_a_loss_scale_goes_on_from_its_state():
    one, other = (LossScale(LossScaleConfig(init=8.0, growth_interval=4), CPU) for _ in range(2))
    for finite in (True, True, False, True):
        one.update(torch.tensor(finite))
    other.load(one.state())
    for finite in (True, True, True, False):
        one.update(torch.tensor(finite))
        other.update(torch.tensor(finite))
        assert one.state() == other.state()


def test_underflow_counts_what_fp16_cannot_hold_whole():
    grads = [torch.tensor([0.0, 1.0, 2.0**-14, 2.0**-15]), torch.tensor([-(2.0**-20)])]
    assert underflow(grads).item() == 2 / 4
    assert underflow([torch.zeros(3)]).item() == 0.0
    large = torch.full((3, 1 << 20), 2.0**-15)  # more than are looked at together
    large[0, :] = 1.0
    assert underflow([large, torch.zeros(3)]).item() == pytest.approx(2 / 3)


def test_fp8_is_refused_by_name_on_a_gpu_without_it():
    for capability in ((8, 9), (9, 0), (12, 0)):
        check_float8(capability)
    for major, minor in ((8, 6), (7, 5)):
        with pytest.raises(ConfigError, match=rf"'fp8' needs .* 8\.9 or more .* has {major}\.{minor}: use bf16"):
            check_float8((major, minor))


def test_fp8_needs_a_layer_that_its_kernels_can_compute():
    pytest.importorskip("torchao", reason="runs with pip install -e '.[fp8]'")
    with pytest.raises(ConfigError, match="multiples of 16: use bf16"):
        prepare(nn.Linear(15, 16), "fp8")


def test_fp8_is_silent_on_kernels_that_it_does_not_use(caplog):
    pytest.importorskip("torchao", reason="runs with pip install -e '.[fp8]'")
    prepare(nn.Linear(16, 16), "fp8")
    logging.getLogger("torchao").warning("Failed to load _C_cutlass.abi3.so: no such library")
    logging.getLogger("torchao").warning("an older torch")
    assert caplog.messages == ["an older torch"]


def test_fp8_rounds_products_and_leaves_small_layers_alone():
    pytest.importorskip("torchao", reason="runs with pip install -e '.[fp8]'")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 3))
    x = torch.randn(16, 32)
    exact = model(x)
    names = [name for name, _ in model.named_parameters()]
    model = prepare(model, "fp8")
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model[1]) is nn.Linear
    with autocast("fp8", CPU):
        rounded = model(x).float()
    error = (rounded - exact).norm() / exact.norm()
    assert 0.005 < error < 0.1, "e4m3 has three bits of mantissa"


@pytest.mark.parametrize(
    ("asked", "device", "has_it", "expected"),
    [
        ("auto", "cpu", True, "fp32"),
        ("auto", "cuda", True, "bf16"),
        ("auto", "cuda", False, "fp32"),
        ("fp32", "cuda", True, "fp32"),
        ("fp16", "cpu", False, "fp16"),
    ],
)
def test_by_default_it_is_bf16_where_a_gpu_has_it(asked, device, has_it, expected, monkeypatch):
    assert TrainConfig().precision == "auto"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_it and not including_emulation)
    assert resolved(TrainConfig(precision=asked), torch.device(device)).precision == expected
