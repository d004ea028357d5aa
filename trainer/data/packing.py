"""Packs several documents into one row, each attending only to itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.view import collated
from trainer.errors import DataError
from trainer.runtime.seeding import derive, shuffled


class Packed:
    """Rows of `length` tokens packed from `documents` (map-style, each a tensor [its length] of ids).

    A sample is a dict of [length] tensors: `tokens`; `positions`, counted from the start of each document; `documents`,
    the number of a token's document within the row, -1 for padding, whose token is `pad_id`. Documents longer than a
    row are cut into pieces, each then a document of its own. `lengths` defaults to `documents.lengths`, or is read.
    With `begins`, a batch also has the `offsets` of its documents under that name, for attention on a GPU.

    Best-fit decreasing: each piece, longest first, goes into the row with the least room that fits it; the number of
    rows stays within 11/9 of the minimum, plus a few (Johnson et al. 1974). The pattern of lengths is fixed, so all
    epochs have the same number of rows; the assignment among documents of equal length is drawn by (seed, epoch). Rows
    are numbered across epochs: index = epoch * rows + row.
    """

    own_indices = True

    def __init__(
        self,
        documents: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        seed: int = 0,
        pad_id: int = 0,
        begins: bool = False,
    ) -> None:
        self.data, self.length, self.seed, self.pad_id = documents, length, seed, pad_id
        self.draws = getattr(documents, "draws", True)
        if lengths is None:
            lengths = getattr(documents, "lengths", None)
        if lengths is None:
            lengths = [len(documents[index]) for index in range(len(documents))]
        if len(lengths) != len(documents):
            raise DataError(f"Packed was given {len(lengths)} lengths for {len(documents)} documents.")
        self._pieces = _pieces(np.asarray(lengths, dtype=np.int64), length)
        if len(self._pieces) == 0:
            raise DataError("Packed was given no document with a token in it.")
        self._sizes = self._pieces[:, 2] - self._pieces[:, 1]
        rows = _best_fit(np.sort(self._sizes)[::-1], length)
        self._slots = np.argsort(rows, kind="stable")  # positions in the order of decreasing length, row by row
        self._starts = np.searchsorted(rows[self._slots], np.arange(rows.max() + 2))
        self._counts = np.diff(self._starts)  # documents in each row
        if begins:
            self.collate = self._with_offsets
        self._epoch, self._placed = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def most_documents(self) -> int:
        """Returns the largest number of documents in a row."""
        return int(self._counts.max())

    def _with_offsets(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns a batch in few shapes: padded to a number of offsets that its documents hardly ever exceed.

        That number is six deviations above the mean number of documents.
        """
        batch = collated(samples)
        usual = len(samples) * self._counts.mean() + 6 * self._counts.std() * len(samples) ** 0.5
        return batch | {"begins": offsets(batch["documents"], math.ceil(usual))}

    def order(self, seed: int, epoch: int, batch_size: int) -> list[int]:
        return [epoch * len(self) + row for row in shuffled(seed, epoch, len(self))]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, row = divmod(index, len(self))
        if epoch != self._epoch:
            self._epoch, self._placed = epoch, self._by_length(epoch)
        pieces = self._pieces[self._placed[self._slots[self._starts[row] : self._starts[row + 1]]]]
        sizes = torch.from_numpy(pieces[:, 2] - pieces[:, 1])
        ends = sizes.cumsum(0)
        full = int(ends[-1])
        tokens = torch.full((self.length,), self.pad_id, dtype=torch.int64)
        positions, documents = torch.zeros_like(tokens), torch.full_like(tokens, -1)
        torch.cat([self.data[document][start:stop] for document, start, stop in pieces.tolist()], out=tokens[:full])
        positions[:full] = torch.arange(full) - (ends - sizes).repeat_interleave(sizes)
        documents[:full] = torch.arange(len(pieces)).repeat_interleave(sizes)
        return {"tokens": tokens, "positions": positions, "documents": documents}

    def _by_length(self, epoch: int) -> np.ndarray:
        """Returns the pieces by decreasing length, those of equal length in an order drawn for `epoch`."""
        generator = torch.Generator().manual_seed(derive(self.seed, "pack", epoch))
        drawn = torch.randperm(len(self._pieces), generator=generator).numpy()
        return drawn[np.argsort(-self._sizes[drawn], kind="stable")]


def _pieces(lengths: np.ndarray, length: int) -> np.ndarray:
    """Returns (document, start, stop) [pieces, 3] of all documents, none longer than `length`."""
    counts = -(-lengths // length)
    document = np.repeat(np.arange(len(lengths)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(document)) - first) * length
    return np.stack([document, start, np.minimum(start + length, lengths[document])], axis=1)


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Returns the row of each piece, given decreasing sizes."""
    rows_with: list[list[int]] = [[] for _ in range(length + 1)]  # by the room left in them
    rooms = 0  # bit r: there is a row with room r
    row_of, rows = np.empty(len(sizes), dtype=np.int64), 0
    for i, size in enumerate(sizes.tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # the least room that fits it
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            room, row, rows = length, rows, rows + 1
        row_of[i] = row
        if room > size:
            rows_with[room - size].append(row)
            rooms |= 1 << (room - size)
    return row_of


def offsets(documents: Tensor, at_least: int = 1) -> Tensor:
    """Returns int32 [n + 1]: the start of each of n documents in the flattened rows, then the number of all tokens.

    documents: [batch, length], the number of a token's document within the row, -1 for the padding at the end, which
    counts as one; on the host, where counting does not wait for a device. n is the next power of two from `at_least`
    on, so that batches come in few shapes: the surplus documents are empty and begin at the end. Raises DataError if a
    document's tokens are not neighbours.
    """
    step = documents[:, 1:] - documents[:, :-1]
    ends = documents[:, 1:] == -1
    if bool(((step < 0) & ~ends | (documents[:, :-1] == -1) & ~ends).any()):
        raise DataError("a row's documents are not numbered in their order: number them 0, 1, ... and padding -1.")
    fresh = torch.ones_like(documents, dtype=torch.bool)
    fresh[:, 1:] = step != 0
    starts = fresh.flatten().nonzero()[:, 0]
    size = 1 << (max(len(starts), at_least) - 1).bit_length()
    begins = torch.full((size + 1,), documents.numel(), dtype=torch.int32)
    begins[: len(starts)] = starts
    return begins


def block_diagonal_mask(documents: Tensor, causal: bool = True) -> Tensor:
    """Returns the mask for `scaled_dot_product_attention`: [batch, 1, length, length], True if a token may look.

    documents: [batch, length], -1 for padding. Each token looks at its own document, with `causal` up to itself;
    padding looks at itself, since a softmax over nothing is NaN.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    length = documents.shape[1]
    if causal:
        same = same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=documents.device)
    return same & (documents >= 0)[:, None, None, :] | itself


def next_tokens(tokens: Tensor, documents: Tensor, ignore: int = -100) -> Tensor:
    """Returns the targets: the document's next token, `ignore` at its end. All are [batch, length]."""
    targets = torch.full_like(tokens, ignore)
    inside = (documents[:, :-1] == documents[:, 1:]) & (documents[:, 1:] >= 0)
    targets[:, :-1] = torch.where(inside, tokens[:, 1:], ignore)
    return targets
