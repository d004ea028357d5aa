"""Tensors of a checkpoint before they are read: of the bytes in its files only those that are asked for are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What an open safetensors file holds of a tensor: under `key` a box of this shape, from `offset` of it on."""

    file: Any
    key: str
    shape: Sequence[int]
    offset: Sequence[int]

    def read(self, box: Sequence[slice]) -> Tensor:
        """What of it lies in a box of its own coordinates."""
        return self.file.get_slice(self.key)[tuple(box)] if self.shape else self.file.get_tensor(self.key)


@dataclass(frozen=True)
class Stored:
    """A tensor of this shape, made up by `parts`, at least one."""

    shape: tuple[int, ...]
    parts: Sequence[Part]

    def read(self, box: Sequence[slice] | None = None) -> Tensor:
        """A copy on the CPU: of the whole, or of the box that one slice for each dimension cuts from it."""
        import torch

        box = [slice(0, n) for n in self.shape] if box is None else box
        pieces = [(at, part.read(mine)) for part in self.parts for at, mine in _common(box, part)]
        dtype = (pieces[0][1] if pieces else self.parts[0].read([slice(0, 0)] * len(box))).dtype
        found = torch.empty([b.stop - b.start for b in box], dtype=dtype)
        for at, piece in pieces:
            found[at] = piece
        return found


def _common(box: Sequence[slice], part: Part) -> Iterator[tuple[tuple[slice, ...], list[slice]]]:
    """What the two have in common, as it lies in the box and as it lies in the part; nothing where that is nothing."""
    sides = zip(box, part.offset, part.shape, strict=True)
    common = [(max(b.start, o), min(b.stop, o + n)) for b, o, n in sides]
    if all(start < stop for start, stop in common):
        yield (
            tuple(slice(start - b.start, stop - b.start) for (start, stop), b in zip(common, box, strict=True)),
            [slice(start - o, stop - o) for (start, stop), o in zip(common, part.offset, strict=True)],
        )


Take = Callable[[tuple[str, ...], Stored], Any]  # what becomes of the tensor that stands at these keys of a state


def whole(path: tuple[str, ...], stored: Stored) -> Tensor:
    """All of it."""
    return stored.read()
