"""Reads tensors of a checkpoint on demand: only the requested bytes of the files are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A box of a tensor in an open safetensors file: stored under `key` with this shape, at `offset` in the tensor."""

    file: Any
    key: str
    shape: Sequence[int]
    offset: Sequence[int]

    def read(self, box: Sequence[slice]) -> Tensor:
        """Returns the values in a box, which is in the part's own coordinates."""
        return self.file.get_slice(self.key)[tuple(box)] if self.shape else self.file.get_tensor(self.key)


@dataclass(frozen=True)
class Stored:
    """A tensor of this shape, made up of `parts`, at least one."""

    shape: tuple[int, ...]
    parts: Sequence[Part]

    def read(self, box: Sequence[slice] | None = None) -> Tensor:
        """Returns a copy on the CPU: of the whole, or of the box that one slice for each dimension cuts from it."""
        import torch

        box = [slice(0, n) for n in self.shape] if box is None else box
        pieces = [(at, part.read(cut)) for part in self.parts for at, cut in _common(box, part)]
        dtype = (pieces[0][1] if pieces else self.parts[0].read([slice(0, 0)] * len(box))).dtype
        values = torch.empty([b.stop - b.start for b in box], dtype=dtype)
        for at, piece in pieces:
            values[at] = piece
        return values


def _common(box: Sequence[slice], part: Part) -> Iterator[tuple[tuple[slice, ...], list[slice]]]:
    """Yields the intersection of the two, in the box's and in the part's coordinates; nothing if it is empty."""
    sides = zip(box, part.offset, part.shape, strict=True)
    common = [(max(b.start, o), min(b.stop, o + n)) for b, o, n in sides]
    if all(start < stop for start, stop in common):
        yield (
            tuple(slice(start - b.start, stop - b.start) for (start, stop), b in zip(common, box, strict=True)),
            [slice(start - o, stop - o) for (start, stop), o in zip(common, part.offset, strict=True)],
        )


Take = Callable[[tuple[str, ...], Stored], Any]  # reads the tensor at these keys of a state


def whole(path: tuple[str, ...], stored: Stored) -> Tensor:
    """Returns the whole tensor."""
    return stored.read()
