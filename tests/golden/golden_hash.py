"""One digest of whatever a part of the product computes, bit by bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def digest(value: Any) -> str:
    """Returns the sha256 of `value`: of the type, shape and bytes of each array, and of all digits of each number."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Returns `value` as JSON has it. Raises TypeError for what has no such form, which would differ by process."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": bytes(data.tolist()).hex()}
    if isinstance(value, np.ndarray | np.generic):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes().hex()}
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"a {type(value).__name__} has no bits that every process agrees on: give its numbers.")
