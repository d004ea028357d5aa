"""Names the operators by which torch computes attention."""

from __future__ import annotations

from typing import Any

from trainer.compat.private import private

KERNELS: list[Any] = [
    private(f"torch:ops.aten._scaled_dot_product_{kind}_attention{device}", seen="2.13").default
    for kind, device in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
]


def varlen_kernel() -> Any:
    """Returns the operator for rows of several documents, once `torch.nn.attention.varlen` was imported."""
    return private("torch:ops.torch_attn._varlen_attn", seen="2.13").default
