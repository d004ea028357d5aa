"""Applies the number formats of forward passes, and the loss scaling that fp16 needs.

    fp32   everything
    tf32   fp32, with matrix products of 10-bit mantissas if the device has them (a GPU since Ampere)
    bf16   autocast; fp32's range, so nothing is scaled
    fp16   autocast; the loss is scaled, or small gradients would round to zero (Micikevicius et al. 2018,
           arXiv 1710.03740)
    fp8    bf16's autocast, and the products of linear layers in float8: e4m3 forward, e5m2 for gradients
           (Micikevicius et al. 2022, arXiv 2209.05433), by torchao

In each of them weights, their gradients and the optimizer's state are fp32, and so are the normalisation layers and
the loss that is summed up.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import LossScaleConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.model.norms import NORMS
from trainer.runtime.quiet_imports import quiet_torchao

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_FP16_NORMAL = 2.0**-14  # the smallest number that fp16 holds with its whole mantissa
_AT_ONCE = 1 << 20  # numbers that are examined at once, since comparing and counting copies them


def resolved(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Returns the configuration with a format in place of `auto`: bf16 on a GPU that computes in it, else fp32."""
    if config.precision != "auto":
        return config
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.model_copy(update={"precision": "bf16" if has_it else "fp32"})


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of every forward pass; its casts of the weights are cached for one pass."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def prepare(model: nn.Module, precision: str) -> nn.Module:
    """Returns `model`, already on its device, ready for `precision`; its parameters and their names stay the same."""
    if precision in _AUTOCAST:
        for module in model.modules():
            if isinstance(module, NORMS):
                module.register_forward_pre_hook(_in_fp32)
    return _float8(model) if precision == "fp8" else model


def _in_fp32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _float8(model: nn.Module) -> nn.Module:
    """Returns the model with float8 products in linear layers whose sizes are multiples of 16, as the kernels need."""
    quiet_torchao()
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("train.precision 'fp8' needs torchao: pip install 'hpo[fp8]'.") from error
    fits = [m for m in model.modules() if isinstance(m, nn.Linear) and _multiple_of_16(m)]
    if not fits:
        raise ConfigError("train.precision 'fp8' finds no linear layer whose sizes are multiples of 16: use bf16.")
    on_cpu = fits[0].weight.device.type == "cpu"  # no kernels there: rounded to float8, multiplied in bf16
    return convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=on_cpu),
        module_filter_fn=lambda module, _: isinstance(module, nn.Linear) and _multiple_of_16(module),
    )


def _multiple_of_16(module: nn.Linear) -> bool:
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


class LossScale:
    """The factor by which fp16's loss is multiplied before its backward pass.

    A step whose gradient is not finite is skipped and halves the factor; `growth_interval` steps without one double it,
    unless it would be infinite (Micikevicius et al. 2018, section 3.2; torch's GradScaler). Both numbers stay on the
    device, so no step waits.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self.config = config
        self.factor = torch.tensor(config.init, device=device)
        self.good_steps = torch.zeros((), device=device)

    def update(self, finite: Tensor) -> None:
        """Records `finite`, a boolean scalar: True if the gradient of a step was finite."""
        if not self.config.dynamic:
            return
        good = torch.where(finite, self.good_steps + 1, 0.0)
        grown = good >= self.config.growth_interval
        doubled = 2 * self.factor
        larger = torch.where(grown & doubled.isfinite(), doubled, self.factor)
        self.factor = torch.where(finite, larger, 0.5 * self.factor)
        self.good_steps = torch.where(grown, 0.0, good)

    @property
    def answers(self) -> Tensor:
        """Returns True if halving alone can resolve an overflow: the factor is dynamic, and stays above 1."""
        return (self.factor > 2.0) & self.config.dynamic

    def state(self) -> dict[str, float]:
        return {"factor": self.factor.item(), "good_steps": self.good_steps.item()}

    def load(self, state: dict[str, float]) -> None:
        self.factor.fill_(state["factor"])
        self.good_steps.fill_(state["good_steps"])


def underflow(grads: list[Tensor]) -> Tensor:
    """Returns the share of the non-zero elements of scaled gradients that are subnormal in fp16."""
    small = filled = torch.zeros((), dtype=torch.int64, device=grads[0].device)
    for part in (part for g in grads for part in g.flatten().split(_AT_ONCE)):
        nonzero = part.count_nonzero()
        filled = filled + nonzero
        small = small + (part.abs() < _FP16_NORMAL).count_nonzero() - (part.numel() - nonzero)
    return small / filled.clamp(min=1)


def matmul_precision(precision: str) -> str:
    """Returns the argument of torch.set_float32_matmul_precision."""
    return "high" if precision == "tf32" else "highest"


def check(config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError if `device` cannot compute in the configured format."""
    if device.type != "cuda":
        return
    if config.precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("train.precision 'bf16' is not what this GPU computes in: use fp16 or fp32.")
    if config.precision == "fp8":
        check_float8(torch.cuda.get_device_capability(device))


def check_float8(capability: tuple[int, int]) -> None:
    """Raises ConfigError if a GPU of that compute capability has no products in float8."""
    if capability < (8, 9):
        raise ConfigError(
            f"train.precision 'fp8' needs a GPU of compute capability 8.9 or more and this one has "
            f"{capability[0]}.{capability[1]}: use bf16."
        )
