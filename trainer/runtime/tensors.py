"""Makes a model's tensors writable and its gradients dense, and refuses tensors that no checkpoint can hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.compat.modules import buffers_in, unsaved_in
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OF_LAZY = "subclass UninitializedParameter"  # part of torch's error for a lazy layer with fake tensors


def divided(tensor: Any) -> TypeGuard[DTensor]:
    """Returns True for a DTensor. Before DTensors are imported, which takes 0.6 s of a processor, there are none."""
    dtensors: Any = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def settle(model: nn.Module) -> nn.Module:
    """Returns the same `model`, whose parameters and buffers can all be written to, saved and loaded.

    A tensor made by expand() has less memory than elements, so nothing can be loaded into it: it is copied. An
    embedding with sparse=True gives a dense gradient, of the same values: optimizers, clipping and ranks require dense
    gradients. Raises TrainerError, naming it, for a tensor that a checkpoint does not hold.
    """
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
        for name, buffer in buffers_in(module).items():
            if buffer is not None and not nn.parameter.is_lazy(buffer) and _expanded(buffer):
                buffers_in(module)[name] = copies.setdefault(id(buffer), buffer.detach().clone().contiguous())
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
    """Returns True if two tensors are equal to the bit, so that NaN equals NaN and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    local = (x.to_local() if divided(x) else x for x in (a, b))
    return torch.equal(*(x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in local))


def left_out(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor | None]]:
    """Yields (module, its name for it, the model's name for it, buffer) for each buffer that state_dict leaves out.

    A buffer that no checkpoint can hold is skipped.
    """
    for prefix, module in model.named_modules():
        for name in sorted(unsaved_in(module)):
            buffer = buffers_in(module).get(name)
            if buffer is None or not (nn.parameter.is_lazy(buffer) or _unsavable(buffer)):
                yield module, name, f"{prefix}.{name}" if prefix else name, buffer


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        left_out = unsaved_in(module)
        named = module.named_buffers(prefix, recurse=False)
        yield from ((name, buffer) for name, buffer in named if name.rpartition(".")[2] not in left_out)


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
