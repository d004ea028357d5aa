"""Loads a task's data set as the windows of an epoch.

A window is what one optimizer step trains on: `batch_size` samples in micro-batches of `micro_batch_size`; the last
window of an epoch holds what is left. Of several ranks that hold replicas of the model, each takes its share of every
window, a run of neighbours, and all take equally many micro-batches: one that runs out gets fillers. Which samples, and
what augmentation and the data set draw for them, depends on (seed, epoch, index) alone: not on the position an epoch is
entered at, nor on the number of workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.config import TrainConfig
from trainer.data.autotune import quickest
from trainer.data.check import ROWS, compare, spread
from trainer.data.transport import map_leaves
from trainer.data.view import collate, order, read
from trainer.data.workers import InProcess, Reader, Request, WorkerLost, Workers
from trainer.errors import DataError
from trainer.runtime.epochs import Epochs, windows
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task


class Sampler:
    """The micro-batches of `epoch` from window `position` on, stateless: set both, then iterate.

    Of `shares`, it gives number `share`. The first shares are the largest, by one sample at most. A micro-batch holds
    `least` samples (1 or 2) where its share of the window has as many and can be cut so.
    """

    def __init__(self, data: Any, config: TrainConfig, share: int = 0, shares: int = 1, least: int = 1) -> None:
        if config.batch_growth.epochs and getattr(data, "one_batch_size", False):
            raise DataError(
                f"train.batch_growth changes the size of batches, by which a source within {type(data).__name__} is "
                "ordered: put what orders it (Bucketed, Curriculum) around the mixture, or leave batch_growth out."
            )
        self.data = data
        self.size = len(data)
        self.seed = config.seed
        self.batch_size_at = config.batch_size_at
        self.epochs = Epochs.of(self.size, config)
        self.batch_sizes = [config.batch_size_at(epoch) for epoch in (0, *config.batch_growth.epochs)]
        self.drop_last = config.drop_last
        self.share, self.shares, self.least = share, shares, least
        first, largest = (-(-size // shares) for size in (config.batch_size, config.largest_batch_size))
        asked = largest if config.micro_batch_size == "auto" else config.fixed_micro_batch_size or first
        self.micro_batch_size = min(asked, largest)
        self.epoch = 0
        self.position = 0

    @property
    def batch_size(self) -> int:
        """Samples of a window of the epoch."""
        return self.batch_size_at(self.epoch)

    @property
    def windows(self) -> int:
        """Windows of the epoch: optimizer steps."""
        return self.epochs.length(self.epoch)

    def micro_batches(self, window: int, share: int) -> list[range]:
        """Where the micro-batches of a share of window number `window` of an epoch lie in the epoch's order."""
        return cut(range(*self._bounds(window, share)), self.micro_batch_size, self.least)

    def halved(self, size: int) -> int:
        """The next smaller micro-batch to try where `size` takes too much memory; `size` where there is none."""
        smaller = max(-(-size // 2), self.least)
        while smaller < size and self.least > 1 and self.single(smaller) and not self.single(size):
            smaller += 1  # of 2, an odd window has one sample left over
        return min(smaller, size)

    def single(self, micro_batch_size: int) -> tuple[int, int] | None:
        """A batch size of the run and the samples of a window of it that would have a micro-batch of one sample."""
        for batch_size in self.batch_sizes:
            count = windows(self.size, batch_size, self.drop_last)
            for samples in (min(batch_size, self.size), min(batch_size, self.size - (count - 1) * batch_size)):
                each, over = divmod(samples, self.shares)
                pieces = (cut(range(share), micro_batch_size, self.least) for share in {each, each + (over > 0)})
                if any(len(piece) == 1 for share in pieces for piece in share):
                    return batch_size, samples
        return None

    def _bounds(self, window: int, share: int) -> tuple[int, int]:
        start = window * self.batch_size
        each, over = divmod(min(self.batch_size, self.size - start), self.shares)
        first = start + share * each + min(share, over)
        return first, first + each + (share < over)

    def indices(self, epoch: int, window: int) -> list[int]:
        """Of all samples in a window, whosever share they are."""
        size = self.batch_size_at(epoch)
        return list(order(self.data, self.seed, epoch, size)[window * size : (window + 1) * size])

    def __iter__(self) -> Iterator[Request]:
        indices = order(self.data, self.seed, self.epoch, self.batch_size)
        for window in range(self.position, self.windows):
            own = self.micro_batches(window, self.share)
            whole = self.micro_batches(window, 0)
            for piece in (*own, *whole[:1] * (len(whole) - len(own))):
                yield self.epoch, list(indices[piece.start : piece.stop])


def cut(samples: range, size: int, least: int) -> list[range]:
    """The samples in pieces of `size`, the last of what is left: `least` (1 or 2) at least, where the one before it has
    them to give."""
    cuts = [*range(samples.start, samples.stop, size), samples.stop]
    if len(cuts) > 2 and samples.stop - cuts[-2] < least < size:
        cuts[-2] = samples.stop - least
    return [range(*pair) for pair in itertools.pairwise(cuts)]


class Fetch:
    """The data set as it is read, here or in a worker: answers a `Request` with a batch."""

    def __init__(self, task: Task, data: Any, config: TrainConfig) -> None:
        self.data = data
        self.seed = config.seed
        self.one_thread = config.num_threads > 1
        self.augment = task.augment if type(task).augment is not Task.augment else None
        self.draws = getattr(data, "draws", True)
        self.generator = torch.Generator()

    def __call__(self, request: Request) -> Any:
        if not self.one_thread:
            return self._read(*request)
        # As in a worker: a sum over many threads differs in its last bits.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._read(*request)
        finally:
            torch.set_num_threads(threads)

    def _read(self, epoch: int, indices: list[int]) -> Any:
        if self.draws:
            seed_all(derive(self.seed, "fetch", epoch, indices[0]))
        if self.augment is None:
            return read(self.data, indices)
        return collate(self.data)([self._augmented(epoch, index) for index in indices])

    def _augmented(self, epoch: int, index: int) -> Any:
        assert self.augment is not None
        sample = self.data[index]
        return self.augment(sample, self.generator.manual_seed(derive(self.seed, "augment", epoch, index)))


class Filler(NamedTuple):
    """A micro-batch of another rank's, trained on by one that has none left, at weight zero: all ranks must call their
    model equally often."""

    batch: Any


def _ignore(kind: str, **fields: Any) -> None:
    pass


class Loader:
    """The windows of any epoch from any position, read by `num_workers` processes that live as long as the loader.

    `on_event(kind, **fields)` hears of the number of workers that was measured best, and of a worker that was lost.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        device: torch.device,
        share: int = 0,
        shares: int = 1,
        on_event: Callable[..., None] = _ignore,
        least: int = 1,
    ) -> None:
        data = training_set(task)
        self.sampler = Sampler(data, config, share, shares, least)
        self._config, self._on_event = config, on_event
        self.waited = 0.0
        self._fetch = Fetch(task, data, config)
        self._pin = device.type == "cuda"
        if config.num_workers == "auto":
            count, self._reader, seconds = quickest(self._reading_with, self.sampler, config.prefetch)
            on_event("num_workers", chosen=count, seconds_per_micro_batch=seconds)
        else:
            self._reader = self._reading_with(config.num_workers)
        if config.validate_data:
            self._validate()

    def _validate(self) -> None:
        indices = spread(order(self.sampler.data, self.sampler.seed, 0, self.sampler.batch_size_at(0)), ROWS)
        batches = self._batches([(0, [index]) for index in indices])
        try:
            compare(self.sampler.data, zip(indices, batches, strict=True))
        except BaseException:
            self.close()
            raise

    def _reading_with(self, num_workers: int) -> Reader:
        timeout, prefetch = self._config.data_timeout, self._config.prefetch
        if num_workers:
            return Workers(self._fetch, num_workers, timeout, self._pin, prefetch)
        return InProcess(self._fetch, timeout, self._pin)

    def epoch(self, epoch: int, position: int) -> Iterator[list[Any]]:
        """The windows of `epoch` from `position` on: each the list of its micro-batches, still on the host.

        `waited` grows by the seconds that each took to come.
        """
        self.waited, start = 0.0, time.perf_counter()
        self.sampler.epoch, self.sampler.position = epoch, position
        batches = self._batches(self.sampler)
        micro_batches, share = self.sampler.micro_batches, self.sampler.share
        for window in range(position, self.sampler.windows):
            own = [next(batches) for _ in micro_batches(window, share)]
            if share > 0:
                own += [Filler(next(batches)) for _ in range(len(micro_batches(window, 0)) - len(own))]
            self.waited += time.perf_counter() - start
            yield own
            start = time.perf_counter()

    def first(self, micro_batch_size: int | None = None) -> Any:
        """As many of the first epoch's first samples as are asked for, or a micro-batch has, read in this process."""
        sampler = self.sampler
        indices = order(sampler.data, sampler.seed, 0, sampler.batch_size_at(0))
        return next(self._reading_with(0).map([(0, list(indices[: micro_batch_size or sampler.micro_batch_size]))]))

    def _batches(self, requests: Iterable[Request]) -> Iterator[Any]:
        """What is asked for; where a worker is lost, the rest in this process if that is configured."""
        taken = 0
        try:
            for batch in self._reader.map(requests):
                yield batch
                taken += 1
        except WorkerLost as lost:
            retried = self._config.data_retry
            self._on_event("data_worker_lost", reason=str(lost), stack=lost.stack, retried=retried)
            if not retried:
                raise
            self._reader = self._reading_with(0)
            yield from self._reader.map(itertools.islice(requests, taken, None))

    def samples(self, position: int) -> int:
        """How many samples the epoch holds from window `position` on."""
        last = min(self.sampler.size, self.sampler.windows * self.sampler.batch_size)
        return max(last - position * self.sampler.batch_size, 0)

    def close(self) -> None:
        """End the worker processes."""
        self._reader.close()


def training_set(task: Task) -> Any:
    """The task's training data. Raises DataError where it cannot be read by index, or is empty."""
    data = task.train_set()
    if isinstance(data, DataLoader | IterableDataset) or not hasattr(type(data), "__len__"):
        raise DataError(
            f"train_set() of {type(task).__name__} returned a {type(data).__name__}, which has no samples by index: "
            "return a map-style data set, of a DataLoader its `dataset`; train.batch_size and num_workers do the rest."
        )
    if len(data) == 0:
        raise DataError(f"the training set of {type(task).__name__} is empty: give it one sample at least.")
    return data


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch, as read on the host, with every tensor in it on `device`; other leaves as they are."""
    if device.type == "cpu":
        return batch
    return map_leaves(batch, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))
