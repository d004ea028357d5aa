"""Mixes several sources in fixed proportions, and orders samples from easy to hard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer.config.data import CurriculumConfig
from trainer.data.view import View, collate, order
from trainer.errors import DataError
from trainer.runtime.seeding import derive


class Mixture:
    """Sources mixed by ratio: `Mixture([(a, 0.7), (b, 0.3)])`; with `phases={2: (0.5, 0.5)}` evenly from epoch 2 on.

    In the first n samples of an epoch, a source's share is its ratio times n, within one sample, for every n. An epoch
    has `size` samples, by default as many as all sources together. Each source is read in its own order, pass after
    pass, through the epochs: all of it is seen before any of it is seen again. An index is (the source's index) *
    (number of sources) + (number of the source).
    """

    own_indices = True

    def __init__(
        self,
        sources: Sequence[tuple[Any, float]],
        *,
        size: int | None = None,
        phases: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        self.sources = [source for source, _ in sources]
        if not sources or min(len(source) for source in self.sources) == 0:
            raise DataError("Mixture needs at least one source, and none that is empty.")
        self.size = sum(map(len, self.sources)) if size is None else size
        if self.size < 1:
            raise DataError(f"Mixture has size {size}: give 1 or more.")
        ratios = {0: [ratio for _, ratio in sources]} | {
            epoch: list(shares) for epoch, shares in (phases or {}).items()
        }
        self.phases = {epoch: self._assigned(epoch, ratios[epoch]) for epoch in sorted(ratios)}
        self._counts = {epoch: np.bincount(self.phases[epoch], minlength=len(sources)) for epoch in self.phases}
        self.draws = any(getattr(source, "draws", True) for source in self.sources)
        # A pass over a source may go on into the next epoch, and must keep one order.
        self.one_batch_size = any(
            getattr(source, name, False) for source in self.sources for name in ("by_batch_size", "one_batch_size")
        )

    def _assigned(self, epoch: int, ratios: Sequence[float]) -> np.ndarray:
        wrong = len(ratios) != len(self.sources) or not all(0 <= ratio < math.inf for ratio in ratios)
        if epoch < 0 or wrong or sum(ratios) == 0:
            raise DataError(
                f"Mixture has ratios {list(ratios)} from epoch {epoch} on: give one per source ({len(self.sources)}), "
                "none negative, not all zero."
            )
        return assign([ratio / sum(ratios) for ratio in ratios], self.size)

    def __len__(self) -> int:
        return self.size

    def source(self, index: int) -> int:
        """Returns the number of the source of the sample at `index`."""
        return index % len(self.sources)

    def __getitem__(self, index: int) -> Any:
        return self.sources[self.source(index)][index // len(self.sources)]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.collate([self[index] for index in indices])

    def collate(self, batch: list[Any]) -> Any:
        return collate(self.sources[0])(batch)

    def order(self, seed: int, epoch: int, batch_size: int) -> list[int]:
        assigned = self.phases[self._phase(epoch)]
        indices = np.empty(self.size, dtype=np.int64)
        for number in range(len(self.sources)):
            positions = np.flatnonzero(assigned == number)
            start = sum(int(self._counts[self._phase(past)][number]) for past in range(epoch))
            taken = self._stream(number, start, len(positions), seed, batch_size)
            indices[positions] = np.array(taken, dtype=np.int64) * len(self.sources) + number
        return indices.tolist()

    def _phase(self, epoch: int) -> int:
        """Returns the first epoch of the phase that `epoch` is in."""
        return max(first for first in self.phases if first <= epoch)

    def _stream(self, number: int, start: int, count: int, seed: int, batch_size: int) -> list[int]:
        """Returns the `count` indices of a source from position `start` of its passes on."""
        source, source_seed, taken = self.sources[number], derive(seed, "mixture", number), []
        while len(taken) < count:
            through, position = divmod(start + len(taken), len(source))
            taken += order(source, source_seed, through, batch_size)[position : position + count - len(taken)]
        return taken


def assign(ratios: Sequence[float], size: int) -> np.ndarray:
    """Returns the source at each of `size` positions [size], so that every prefix has the right proportions within one
    sample.

    Tijdeman's algorithm for the chairman assignment problem (Discrete Mathematics 32, 1980): of the sources that are
    due at all, it takes the one that would be late first. With k sources none is ever off by more than 1 - 1/(2k - 2).
    """
    live = [(number, ratio) for number, ratio in enumerate(ratios) if ratio > 0]
    slack = 1 / (2 * len(live) - 2) if len(live) > 1 else 0.0
    counts = dict.fromkeys((number for number, _ in live), 0)
    sources = np.empty(size, dtype=np.int16)
    for position in range(size):
        best, soonest = -1, math.inf
        for number, ratio in live:
            due = ratio * (position + 1) - counts[number]
            late = (1 - slack - due) / ratio
            if due >= slack - 1e-9 and late < soonest:
                best, soonest = number, late
        counts[best] += 1
        sources[position] = best
    return sources


class Curriculum(View):
    """`data` from easy to hard: only a share of its samples, sorted by `scores` (low is easy), is visible at first.

    Each sample is drawn, with replacement, from those visible at its step; the share grows as `config` says (Bengio et
    al. 2009; the root is Platanios et al. 2019). Once all are visible, an epoch visits each once, as without it.
    """

    def __init__(self, data: Any, scores: Sequence[float], config: CurriculumConfig) -> None:
        super().__init__(data)
        self._check_by_place("scores", scores)
        if len(bad := np.flatnonzero(np.isnan(np.asarray(scores, dtype=np.float64)))):
            raise DataError(f"the score of sample {bad[0]} is nan: give every sample a difficulty.")
        self.config = config
        self.by_batch_size = True
        self._ranked = torch.from_numpy(np.argsort(np.asarray(scores), kind="stable"))

    def order(self, seed: int, epoch: int, batch_size: int) -> Sequence[int]:
        if visible(self.config, float(epoch)) >= 1:
            return super().order(seed, epoch, batch_size)
        windows = -(-len(self) // batch_size)
        shares = torch.tensor([visible(self.config, epoch + w / windows) for w in range(windows)], dtype=torch.float64)
        counts = (shares * len(self)).ceil().clamp(min(batch_size, len(self)), len(self))
        counts = counts.repeat_interleave(batch_size)[: len(self)]
        generator = torch.Generator().manual_seed(derive(seed, "curriculum", epoch))
        drawn = (torch.rand(len(self), generator=generator, dtype=torch.float64) * counts).floor()
        return self._ranked[torch.minimum(drawn, counts - 1).long()].tolist()


def visible(config: CurriculumConfig, epoch: float) -> float:
    """Returns the share of the samples that is visible after `epoch` epochs, fractions included."""
    done = min(epoch / config.epochs, 1.0)
    if config.pacing == "linear":
        return config.start + (1 - config.start) * done
    if config.pacing == "root":
        return math.sqrt(config.start**2 + (1 - config.start**2) * done)
    return config.start ** (1 - done)
