"""Sums the loss by the position of a token in its document: how far a model reads what stands before; torch only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.data import next_tokens

FIRST = 64  # the first octave of positions begins here; those before it are one


class Reach:
    """The loss in nats per token, of predicted tokens at positions of a document in octaves: 0 to 63, 64 to 127, ...

    start: the bytes at the start of a generated document that define its keys, 0 for none. The digits after them stand
    in the definitions, so their loss tells how far back the model finds one.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))

    def add(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Adds the loss of a batch of rows by their logits [batch, length, vocab_size]."""
        targets = next_tokens(batch["tokens"], batch["documents"])
        losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").cpu()
        targets = targets.cpu()
        position = batch["positions"].cpu() + 1
        octaves = torch.where(position < FIRST, -1, (position / FIRST).log2().floor().long())
        counted = targets >= 0
        digits = counted & (targets >= ord("0")) & (targets <= ord("9")) & (position > self._start)
        for octave in octaves[counted].unique().tolist():
            begin = FIRST * 2**octave if octave >= 0 else 0
            within = counted & (octaves == octave)
            self._count(f"loss_from_{begin}", losses[within])
            if self._start:
                self._count(f"digits_from_{begin}", losses[within & digits])

    def _count(self, name: str, losses: Tensor) -> None:
        self._sums[name] += torch.tensor([float(losses.double().sum()), len(losses)], dtype=torch.float64)

    def metrics(self) -> dict[str, float]:
        """Returns `loss_from_64` and so on, for octaves that have tokens, and `digits_from_64` where there are keys."""
        return {name: float(total / count) for name, (total, count) in sorted(self._sums.items()) if count}
