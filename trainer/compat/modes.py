"""Leaves the modes in which torch traces calls instead of computing them. Torch-free."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def without_modes(torch: Any) -> AbstractContextManager[object]:
    """Returns a context in which tensors are real, also while the compiler traces a model (torch 2.13)."""
    return torch.utils._python_dispatch._disable_current_modes()
