"""Describes an exported file, and compares its outputs with the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer.errors import TrainerError

TOLERANCE = 1e-3  # of the largest output: an export that differs more is refused


@dataclass(frozen=True)
class Exported:
    """An exported file, or a directory.

    `difference` is the largest difference between the model's outputs and the file's. `free` is True if the batch size
    is free; None if the file holds only weights. `note` has a sentence about what the format could not hold, or about
    the next step.
    """

    path: Path
    format: str
    size: int
    samples: int
    difference: float
    free: bool | None
    note: str = ""


def compared(expected: Sequence[Tensor], read: Sequence[Tensor], format: str, tolerance: float = TOLERANCE) -> float:
    """Returns the largest difference of the outputs that were read back. Raises TrainerError if it is too large."""
    difference = max((_difference(a, b) for a, b in zip(expected, read, strict=True)), default=0.0)
    largest = max((float(x.abs().max()) for x in expected if x.numel()), default=0.0)
    if not difference <= tolerance * max(largest, 1e-6):
        raise TrainerError(
            f"the {format} file's outputs differ from the model's by {difference:.3g}, and the largest is "
            f"{largest:.3g}: it is not written."
        )
    return difference


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
