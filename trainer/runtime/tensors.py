"""Gives a model's tensors memory of their own and dense gradients, refuses what no checkpoint holds, and tells those of
which a rank has a part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.errors import TrainerError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OF_LAZY = "subclass UninitializedParameter"  # torch's words where a lazy layer is made of fake tensors


def divided(tensor: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Until something has imported those, which takes 0.6 s of a processor, nothing is."""
    dtensors: Any = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def settle(model: nn.Module) -> nn.Module:
    """The same `model`, every parameter and buffer of which can be written to, saved and loaded.

    A tensor that expand() has made has fewer places in memory than elements, which nothing can be loaded into: it gets
    a copy. An embedding with sparse=True gives a dense gradient, of the same values: optimizers, clipping and ranks
    take no other. Raises TrainerError, naming it, for a tensor that a checkpoint does not hold.
    """
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
        for name, buffer in module._buffers.items():
            if buffer is not None and not nn.parameter.is_lazy(buffer) and _expanded(buffer):
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone().contiguous())
    for p in model.parameters():
        if not nn.parameter.is_lazy(p) and _expanded(p):
            p.data = p.data.clone(memory_format=torch.contiguous_format)
    for name, tensor in _saved(model):
        if not nn.parameter.is_lazy(tensor) and (kind := _unsavable(tensor)):
            raise TrainerError(
                f"{name!r} of {type(model).__name__} is {kind}, which no checkpoint holds: keep it dense, in another "
                "type, or register it as a buffer with persistent=False."
            )
    return model


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tells whether two tensors are equal to the bit, so that NaN equals NaN and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    local = (x.to_local() if divided(x) else x for x in (a, b))
    return torch.equal(*(x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in local))


def left_out(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor | None]]:
    """Yields (module, its name for it, the model's name for it, buffer) for each buffer that state_dict leaves out.

    A buffer that no checkpoint can hold is passed over.
    """
    for prefix, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is None or not (nn.parameter.is_lazy(buffer) or _unsavable(buffer)):
                yield module, name, f"{prefix}.{name}" if prefix else name, buffer


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        left_out = module._non_persistent_buffers_set
        own = module.named_buffers(prefix, recurse=False)
        yield from ((name, buffer) for name, buffer in own if name.rpartition(".")[2] not in left_out)


def _expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _unsavable(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"sparse ({str(tensor.layout)[6:]})"
    if tensor.is_quantized or tensor.dtype in (torch.complex32, torch.complex128):
        return f"of {tensor.dtype}"
    return ""
