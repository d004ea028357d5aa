"""Computes dropout and batch norm lane by lane, so that a lane's numbers do not depend on the others.

Dropout: under `torch.vmap` a random number of "different" randomness depends on how many lanes there are and on the
place among them. Here a lane's mask comes from a generator of its own, seeded as `trainer.runtime.seeding` says and
drawn from in the order of the layers, with the kernel that torch's dropout uses on a CPU: so it is that of the trial on
its own, to the bit.

Few elements: what is less than a processor's vector for each lane would fill vectors of several lanes, and of the last
ones be computed by other code.

Batch norm of vectors: torch's kernel adds up in an order that depends on the number of channels, and those of all lanes
are channels to it. Here the mean and the variance are means over the batch.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from trainer.errors import ConfigError

SPARE = 32  # elements: twice the widest vector
# What a processor computes of whole vectors in another way than of what is left of the last one, to the last bit. Exact
# operations and exp, log, tanh and square roots are the same in both.
_IN_TWO_WAYS = {
    *("sigmoid", "logsigmoid", "log_sigmoid", "softplus", "gelu", "silu", "elu", "selu", "celu", "mish", "hardswish"),
    *("glu", "special_expit", "sigmoid_", "pow_", "__ipow__"),
    *("erf", "erfc", "erfinv", "expm1", "exp2", "log1p", "log2", "log10", "logit", "pow", "__pow__", "__rpow__"),
    *("sin", "cos", "tan", "atan", "sinh", "cosh", "asinh", "lgamma", "digamma", "xlogy", "atan2"),
}
# What has the lanes after the samples in memory.
_OF_SAMPLES = ("conv", "avg_pool", "max_pool", "adaptive_")
_OF_CHANNELS = {F.dropout1d: 2, F.dropout2d: 0, F.dropout3d: 4}  # and the dimensions of one sample; 0: always several


Draw = Callable[[Tensor, Sequence[float]], None]


class PerLane(float):
    """The p of a dropout layer, of each lane; as a number, the first one's."""

    values: tuple[float, ...]

    def __new__(cls, values: Sequence[float]) -> PerLane:
        one = super().__new__(cls, values[0])
        one.values = tuple(values)
        return one


class Lanewise(TorchFunctionMode):
    """Within it, dropout draws from `seeds`, one for each lane; rows beyond them are not dropped. What else draws is
    for vmap to refuse. Lanes of equal seeds and equal `rates`, their dropout rates in the model's order, have the same
    masks, which are drawn once."""

    def __init__(self, seeds: Sequence[int], device: torch.device, rates: Sequence[tuple[float, ...]] = ()) -> None:
        super().__init__()
        self._seeds, self._device = seeds, device
        keys = [*zip(seeds, rates or [()] * len(seeds), strict=True)]
        firsts: dict[Any, int] = {}
        self._first = [firsts.setdefault(key, i) for i, key in enumerate(keys)]  # of those that have the same masks
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
        found = func(*args, **kwargs)
        if name.startswith(_OF_SAMPLES) and isinstance(found, Tensor) and found[0].numel() < SPARE:
            return _Leading.apply(_checked(found) if name.startswith("conv") else found)
        return found

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
        """Fill masks [rows, ...] with the next of each lane: 0 where dropped, else 1 / (1 - p)."""
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
    """What a convolution gives, if the order in which it adds up does not depend on the number of lanes."""
    if x.shape[2:].numel() == 1:
        raise ConfigError(
            f"train.lanes: a convolution of maps of one point with {x[0].numel()} outputs, fewer than {SPARE}, rounds "
            "by how many lanes there are: put nn.Linear in its place, or set train.lanes=1."
        )
    return x


def _are_few(args: Sequence[Any]) -> bool:
    """Whether the tensors among them have less than the elements that spare rows take up."""
    sizes = [one.numel() for one in args if isinstance(one, Tensor)]
    return bool(sizes) and max(sizes) < SPARE


def _filled_up(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The function of few elements, as that of SPARE of which the others are dropped."""
    places = [i for i, one in enumerate(args) if isinstance(one, Tensor)]
    tensors = torch.broadcast_tensors(*[args[i] for i in places])
    given, shape = [*args], tensors[0].shape
    for i, tensor in zip(places, tensors, strict=True):
        given[i] = torch.cat([tensor.reshape(-1), tensor.new_ones(SPARE - tensor.numel())])
    return func(*given, **kwargs)[: shape.numel()].view(shape)


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
    """`torch.nn.functional.batch_norm` of x [batch, channels]."""
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
    """The same, with the lanes as the first dimension in memory, at whose end the spare rows are."""

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
    """A mask of `shape` for each lane, or for the only one. One of x's own shape lies in memory as x does: torch draws
    in that order."""

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


def layers(model: nn.Module) -> list[_DropoutNd]:
    """The dropout layers of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, _DropoutNd)]
