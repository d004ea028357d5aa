"""Computes causal attention within documents, by a flash kernel if the device has one.

Several documents in one row must not see each other. The plain way masks all others out, [length, length] for each row,
and a mask keeps torch from its flash kernels. On a GPU of compute capability 8.0 or more, in bf16 or fp16, attention
takes the offsets of the documents instead (Dao 2023, arXiv 2307.08691, by torch.nn.attention.varlen): it computes
nothing outside of a document, and heads that share keys and values read them in place.

    begins = offsets(documents)                  # on the host, when the batch is made
    mask = within(documents, width, begins)    # once for all layers
    y = attention(q, k, v, mask)               # in each layer
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.compat.attention import varlen_kernel
from trainer.compat.compiler import called_as_it_is
from trainer.runtime.second_order import plainly

_AMPERE = 8  # major compute capability
_WIDEST = 256  # the flash kernel's largest head size
_as_if: torch.device | None = None
_KERNEL = "torch.nn.attention.varlen"  # since torch 2.10; takes two seconds to import, so only when used
_IN_TORCH = importlib.util.find_spec(_KERNEL) is not None


def kernels() -> list[Any]:
    """Returns the attention operators in use other than torch's own."""
    return [varlen_kernel()] if _KERNEL in sys.modules else []


@contextmanager
def as_on(device: torch.device) -> Iterator[None]:
    """Chooses kernels as for `device`, wherever tensors are, for estimates, whose tensors have only shapes and are on
    the host."""
    global _as_if
    before, _as_if = _as_if, device
    try:
        yield
    finally:
        _as_if = before


def has_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Returns True if the flash kernel takes heads of `width` numbers of `dtype`.

    It has no second derivative and no rule for torch.vmap, so passes that need either are computed without it.
    """
    device = _as_if or device
    if device.type != "cuda" or plainly() or not _IN_TORCH:
        return False
    if dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > _WIDEST:
        return False
    return torch.cuda.get_device_properties(device).major >= _AMPERE


def within(documents: Tensor, width: int, begins: Tensor | None = None) -> Tensor | None:
    """Returns the argument of `attention` that keeps documents apart: `begins` for the kernel, else a mask.

    documents: [batch, length], the number of a token's document within the row, -1 for the padding at the end. `width`
    is a head's; the kernel is chosen for the type that autocast computes in. begins: the `offsets` of the batch
    (trainer.data.packing); none at all, [0], mean that each row is one document, which needs neither; None
    gives a mask.
    """
    device = documents.device
    half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    if begins is None or not has_kernel(device, half, width):
        return document_mask(documents)
    if not len(begins):
        return None
    from torch.nn.attention import varlen  # noqa: F401  selective checkpointing needs it loaded before the first layer

    return begins


def document_mask(documents: Tensor) -> Tensor:
    """Returns the mask [batch, 1, length, length] by which a token sees its own document up to itself.

    Padding looks at padding.
    """
    length = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(width)) v of each head, causal, within the documents passed to `within`.

    q: [batch, heads, length, width]; k, v: [batch, kv_heads, length, width], of which `heads / kv_heads` successive
    heads share one; the result is as q. mask: None if each row is one document, offsets for the kernel, or a mask
    [batch, 1, length, keys], True if a token may look.
    """
    if mask is not None and mask.dtype == torch.int32:
        return _flash(q, k, v, mask)
    shared = q.shape[1] // k.shape[1]
    if mask is None and has_kernel(q.device, q.dtype, q.shape[-1]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1)
    # Not enable_gqa: with a mask no fused GPU kernel supports it, and all scores would be written out.
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def _flash(q: Tensor, k: Tensor, v: Tensor, begins: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    shared: Any = {"enable_gqa": True} if _tells() else {}
    batch, _, length, _ = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # [tokens, heads, width]
    out = varlen_attn(q, k, v, begins, begins, length, length, window_size=(-1, 0), **shared)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def _tells() -> bool:
    """Returns True if the kernel takes `enable_gqa` for shared heads, as since torch 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# A compiler calls it instead of tracing it.
called_as_it_is(_tells)
