"""From a task's data set to the windows of an epoch.

A window is what one optimizer step trains on: `batch_size` samples in micro-batches of `micro_batch_size`; the last
window of an epoch holds what is left. Of several ranks that hold replicas of the model, each takes its share of every
window, a run of neighbours, and all take equally many micro-batches: one that runs out gets fillers. Which samples, and
what augmentation and the data set draw for them, depends on (seed, epoch, index) alone: not on the position an epoch is
entered at, nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from trainer.config import TrainConfig
from trainer.errors import DataError
from trainer.seeding import derive, seed_all, shuffled
from trainer.task import Task

# What the sampler hands to a worker: the epoch and the indices of one micro-batch.
Request = tuple[int, list[int]]


class Sampler:
    """The micro-batches of `epoch` from window `position` on, stateless: set both, then iterate.

    Of `shares`, it gives number `share`. The first shares are the largest, by one sample at most.
    """

    def __init__(self, size: int, config: TrainConfig, share: int = 0, shares: int = 1) -> None:
        self.size = size
        self.seed = config.seed
        self.batch_size = config.batch_size
        self.share, self.shares = share, shares
        largest = -(-config.batch_size // shares)
        self.micro_batch_size = min(config.micro_batch_size or largest, largest)
        self.epoch = 0
        self.position = 0

    @property
    def windows(self) -> int:
        """Windows of one epoch: optimizer steps."""
        return -(-self.size // self.batch_size)

    def micro_batches(self, window: int, share: int) -> range:
        """Where the micro-batches of a share of window number `window` of an epoch start in the epoch's order."""
        start, stop = self._bounds(window, share)
        return range(start, stop, self.micro_batch_size)

    def _bounds(self, window: int, share: int) -> tuple[int, int]:
        start = window * self.batch_size
        each, over = divmod(min(self.batch_size, self.size - start), self.shares)
        first = start + share * each + min(share, over)
        return first, first + each + (share < over)

    def __iter__(self) -> Iterator[Request]:
        order = shuffled(self.seed, self.epoch, self.size)
        for window in range(self.position, self.windows):
            _, stop = self._bounds(window, self.share)
            own = self.micro_batches(window, self.share)
            for i in own:
                yield self.epoch, order[i : min(i + self.micro_batch_size, stop)]
            whole, (_, end) = self.micro_batches(window, 0), self._bounds(window, 0)
            for _ in range(len(whole) - len(own)):
                yield self.epoch, order[whole[0] : min(whole[0] + self.micro_batch_size, end)]


class Fetch(Dataset):
    """The data set as a worker sees it: answers a `Request` with a batch."""

    def __init__(self, task: Task, data: Any, seed: int) -> None:
        self.data = data
        self.seed = seed
        self.augment = task.augment if type(task).augment is not Task.augment else None
        self.draws = getattr(data, "draws", True)
        self.generator = torch.Generator()

    def __getitems__(self, request: Request) -> Any:
        epoch, indices = request
        if self.draws:
            seed_all(derive(self.seed, "fetch", epoch, indices[0]))
        if self.augment is not None:
            return default_collate([self._augmented(epoch, index) for index in indices])
        if not hasattr(self.data, "__getitems__"):
            return default_collate([self.data[index] for index in indices])
        batch = self.data.__getitems__(indices)
        return default_collate(batch) if isinstance(batch, list) else batch

    def _augmented(self, epoch: int, index: int) -> Any:
        assert self.augment is not None
        sample = self.data[index]
        return self.augment(sample, self.generator.manual_seed(derive(self.seed, "augment", epoch, index)))


class Filler(NamedTuple):
    """A micro-batch of another rank's, trained on by one that has none left, at weight zero: all ranks must call their
    model equally often."""

    batch: Any


def _as_is(batch: Any) -> Any:
    return batch


class Loader:
    """The windows of any epoch from any position, read by `num_workers` processes that live as long as the loader."""

    def __init__(self, task: Task, config: TrainConfig, device: torch.device, share: int = 0, shares: int = 1) -> None:
        data = task.train_set()
        if len(data) == 0:
            raise DataError(f"the training set of {type(task).__name__} is empty.")
        self.sampler = Sampler(len(data), config, share, shares)
        self._fetch = Fetch(task, data, config.seed)
        self._loader: Any = None
        if config.num_workers > 0:
            self._loader = DataLoader(
                self._fetch,
                batch_sampler=self.sampler,  # type: ignore[arg-type]
                collate_fn=_as_is,
                num_workers=config.num_workers,
                persistent_workers=True,
                pin_memory=device.type == "cuda",
                generator=torch.Generator(),  # of its own, so that starting an epoch draws nothing from ours
            )

    @property
    def windows(self) -> int:
        return self.sampler.windows

    def epoch(self, epoch: int, position: int) -> Iterator[list[Any]]:
        """The windows of `epoch` from `position` on: each the list of its micro-batches, still on the host."""
        self.sampler.epoch, self.sampler.position = epoch, position
        batches = iter(self._loader) if self._loader is not None else map(self._fetch.__getitems__, self.sampler)
        micro_batches, share = self.sampler.micro_batches, self.sampler.share
        for window in range(position, self.windows):
            own = [next(batches) for _ in micro_batches(window, share)]
            if share > 0:
                own += [Filler(next(batches)) for _ in range(len(micro_batches(window, 0)) - len(own))]
            yield own

    def first(self) -> Any:
        """The first micro-batch of the first epoch, read in this process."""
        self.sampler.epoch, self.sampler.position = 0, 0
        return self._fetch.__getitems__(next(iter(self.sampler)))

    def samples(self, position: int) -> int:
        """How many samples an epoch holds from window `position` on."""
        return max(self.sampler.size - position * self.sampler.batch_size, 0)

    def close(self) -> None:
        """End the worker processes."""
        self._loader = None


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch, as read on the host, with every tensor in it on `device`; other leaves as they are."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
