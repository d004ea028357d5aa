"""Computes dropout and batch norm lane by lane, so that a lane's numbers do not depend on the others.

Dropout: under `torch.vmap` a random number of "different" randomness depends on the number of lanes and the position
among them. Here a lane's mask comes from its own generator, seeded as `trainer.runtime.seeding` says and drawn from in
the order of the layers, with the kernel that torch's dropout uses on a CPU: so it equals the mask of the trial on its
own, to the bit.

Few elements: if each lane has fewer than a processor's vector, a vector spans several lanes, and the last elements are
computed by other code.

Batch norm of vectors: torch's kernel sums in an order that depends on the number of channels, and takes the channels of
all lanes together. Here the mean and the variance are means over the batch.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trainer.compat.modules import DropoutNd
from trainer.errors import ConfigError

SPARE = 32  # elements: twice the widest vector
# Functions whose last bit differs between whole vectors of a processor and the rest of the last one. Exact operations
# and exp, log, tanh and square roots are the same in both.
_IN_TWO_WAYS = {
    *("sigmoid", "logsigmoid", "log_sigmoid", "softplus", "gelu", "silu", "elu", "selu", "celu", "mish", "hardswish"),
    *("glu", "special_expit", "sigmoid_", "pow_", "__ipow__"),
    *("erf", "erfc", "erfinv", "expm1", "exp2", "log1p", "log2", "log10", "logit", "pow", "__pow__", "__rpow__"),
    *("sin", "cos", "tan", "atan", "sinh", "cosh", "asinh", "lgamma", "digamma", "xlogy", "atan2"),
}
# Functions whose output has the lanes after the samples in memory.
_OF_SAMPLES = ("conv", "avg_pool", "max_pool", "adaptive_")
_OF_CHANNELS = {F.dropout1d: 2, F.dropout2d: 0, F.dropout3d: 4}  # with the dimensions of one sample; 0: always several


Draw = Callable[[Tensor, Sequence[float]], None]


class PerLane(float):
    """The p of a dropout layer for each lane; as a number, the first lane's."""

    values: tuple[float, ...]

    def __new__(cls, values: Sequence[float]) -> PerLane:
        p = super().__new__(cls, values[0])
        p.values = tuple(values)
        return p


class Lanewise(TorchFunctionMode):
    """Makes dropout draw from `seeds` within the block, one for each lane; rows beyond them are not dropped.

    vmap refuses all other draws. Lanes with equal seeds and equal `rates`, their dropout rates in the model's order,
    have the same masks, which are drawn once.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device, rates: Sequence[tuple[float, ...]] = ()) -> None:
        super().__init__()
        self._seeds, self._device = seeds, device
        keys = [*zip(seeds, rates or [()] * len(seeds), strict=True)]
        firsts: dict[Any, int] = {}
        self._first = [firsts.setdefault(key, i) for i, key in enumerate(keys)]  # the first lane with the same masks
        self._generators: dict[int, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func in _OF_CHANNELS:
            return self._dropout(_OF_CHANNELS.get(func), *args, **kwargs)
        if func is F.batch_norm and args[0].ndim == 2:
            return _batch_norm(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _IN_TWO_WAYS and _are_few(args):
            return _filled_up(func, args, kwargs)
        output = func(*args, **kwargs)
        if name.startswith(_OF_SAMPLES) and isinstance(output, Tensor) and output[0].numel() < SPARE:
            return _Leading.apply(_checked(output) if name.startswith("conv") else output)
        return output

    def _dropout(
        self, sample: int | None, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or x.numel() == 0:
            return x
        channels = 1 if sample is None or x.ndim == sample else 2
        shape = x.shape if sample is None else (*x.shape[:channels], *(1 for _ in x.shape[channels:]))
        rates = p.values if isinstance(p, PerLane) else (float(p),) * len(self._seeds)
        return x * _Mask.apply(x.detach(), self._draw, rates, tuple(shape)) if any(rates) else x

    def _draw(self, masks: Tensor, rates: Sequence[float]) -> None:
        """Fills masks [rows, ...] with each lane's next mask: 0 where dropped, else 1 / (1 - p)."""
        masks[len(self._first) :] = 1.0
        for lane in dict.fromkeys(self._first):
            mask, p = masks[lane], rates[lane]
            if p in (0.0, 1.0):
                mask.fill_(1 - p)
                continue
            if lane not in self._generators:
                self._generators[lane] = torch.Generator(self._device).manual_seed(self._seeds[lane])
            mask.bernoulli_(1 - p, generator=self._generators[lane]).div_(1 - p)
        if copies := [lane for lane, first in enumerate(self._first) if first != lane]:
            masks[copies] = masks[[self._first[lane] for lane in copies]]


def _checked(x: Tensor) -> Tensor:
    """Returns a convolution's output; raises ConfigError if its order of summation depends on the number of lanes."""
    if x.shape[2:].numel() == 1:
        raise ConfigError(
            f"train.lanes: a convolution of maps of one point with {x[0].numel()} outputs, fewer than {SPARE}, rounds "
            "by how many lanes there are: put nn.Linear in its place, or set train.lanes=1."
        )
    return x


def _are_few(args: Sequence[Any]) -> bool:
    """Returns True if the tensors among them have fewer elements than the spare rows take up."""
    sizes = [arg.numel() for arg in args if isinstance(arg, Tensor)]
    return bool(sizes) and max(sizes) < SPARE


def _filled_up(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Returns the function of few elements, computed on SPARE elements of which the others are dropped."""
    indices = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    tensors = torch.broadcast_tensors(*[args[i] for i in indices])
    filled, shape = [*args], tensors[0].shape
    for i, tensor in zip(indices, tensors, strict=True):
        filled[i] = torch.cat([tensor.reshape(-1), tensor.new_ones(SPARE - tensor.numel())])
    return func(*filled, **kwargs)[: shape.numel()].view(shape)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Returns `torch.nn.functional.batch_norm` of x [batch, channels]."""
    if training:
        n, mean = x.shape[0], x.mean(0)
        if n == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        var = (x - mean).square().mean(0)
        if running_mean is not None and running_var is not None:
            running_mean.mul_(1 - momentum).add_(momentum * mean.detach())
            running_var.mul_(1 - momentum).add_(momentum * n / (n - 1) * var.detach())
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean, running_var
    y = (x - mean) * (var + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


class _Leading(torch.autograd.Function):
    """Returns its input with the lanes as the first dimension in memory, so that the spare rows come last."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int | None]:  # type: ignore[override]
        return (x, None) if in_dims[0] is None else (x.movedim(in_dims[0], 0).contiguous(), 0)


class _Mask(torch.autograd.Function):
    """A mask of `shape` for each lane, or for the only one.

    A mask of x's own shape has the memory layout of x: torch draws in that order.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, draw: Draw, rates: tuple[float, ...], shape: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        mask = torch.empty_like(x) if x.shape == shape else x.new_empty(shape)
        draw(mask.unsqueeze(0), rates)
        return mask

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, None, None

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: Any, x: Tensor, draw: Draw, rates: Any, shape: Any
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        mask = torch.empty_like(x) if x.shape[1:] == shape else x.new_empty((info.batch_size, *shape))
        draw(mask, rates)
        return mask, 0


def layers(model: nn.Module) -> list[DropoutNd]:
    """Returns the dropout layers of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, DropoutNd)]
