"""Reads properties of a tensor and its storage that have no public names."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from trainer.compat.private import private

check_finite_and_scale_ = private("torch:_amp_foreach_non_finite_check_and_unscale_", seen="2.13")


def identity(storage: Any) -> int:
    """Returns the address that identifies a storage (torch 2.13)."""
    return storage._cdata


def version(tensor: Tensor) -> int:
    """Returns how often a tensor has been changed in place (torch 2.13)."""
    return tensor._version


def base(tensor: Tensor) -> Tensor | None:
    """Returns the tensor that this one is a view of (torch 2.13)."""
    return tensor._base


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the indices and values of a sparse COO tensor, which need not be coalesced (torch 2.13)."""
    return [tensor._indices(), tensor._values()]


def is_fake(tensor: Tensor) -> bool:
    """Returns True for a tensor that has a shape and no values (torch 2.13)."""
    fakes: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)
