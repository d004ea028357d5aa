"""Loads a task's data set as the windows of an epoch.

A window is the data of one optimizer step: `batch_size` samples in micro-batches of `micro_batch_size`; the last window
of an epoch holds the rest. Ranks that hold replicas of the model each take a share of every window, a run of
neighbours, and all take equally many micro-batches: a rank that runs out gets fillers. The samples, and the random
draws of augmentation and the data set, depend on (seed, epoch, index) alone: not on the position at which an epoch is
entered, nor on the number of workers.
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
from trainer.data.tensors import TensorDataset
from trainer.data.transport import map_leaves
from trainer.data.view import collate, order, read
from trainer.data.workers import InProcess, Reader, Request, WorkerLost, Workers
from trainer.errors import DataError
from trainer.runtime.epochs import Epochs, windows
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task

QUICK = 1 << 20  # bytes


class Sampler:
    """The micro-batches of `epoch` from window `position` on, stateless: set both, then iterate.

    It yields share `share` of `shares`. The first shares are the largest, by one sample at most. A micro-batch holds at
    least `least` samples (1 or 2) if its share of the window has as many and can be cut so.
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
        wanted = largest if config.micro_batch_size == "auto" else config.fixed_micro_batch_size or first
        self.micro_batch_size = min(wanted, largest)
        self.epoch = 0
        self.position = 0

    @property
    def batch_size(self) -> int:
        """Returns the samples of a window of the epoch."""
        return self.batch_size_at(self.epoch)

    @property
    def windows(self) -> int:
        """Returns the windows of the epoch: its optimizer steps."""
        return self.epochs.length(self.epoch)

    def micro_batches(self, window: int, share: int) -> list[range]:
        """Returns the ranges, in the epoch's order, of the micro-batches of a share of window number `window`."""
        return cut(range(*self._bounds(window, share)), self.micro_batch_size, self.least)

    def halved(self, size: int) -> int:
        """Returns the next smaller micro-batch size to try if `size` takes too much memory; `size` if there is none."""
        smaller = max(-(-size // 2), self.least)
        while smaller < size and self.least > 1 and self.single(smaller) and not self.single(size):
            smaller += 1  # with 2, an odd window has one sample left over
        return min(smaller, size)

    def single(self, micro_batch_size: int) -> tuple[int, int] | None:
        """Returns a batch size of the run and the size of a window that would get a micro-batch of one sample.

        Returns None if there is none.
        """
        for batch_size in self.batch_sizes:
            count = windows(self.size, batch_size, self.drop_last)
            for samples in (min(batch_size, self.size), min(batch_size, self.size - (count - 1) * batch_size)):
                each, rest = divmod(samples, self.shares)
                pieces = (cut(range(share), micro_batch_size, self.least) for share in {each, each + (rest > 0)})
                if any(len(piece) == 1 for share in pieces for piece in share):
                    return batch_size, samples
        return None

    def _bounds(self, window: int, share: int) -> tuple[int, int]:
        start = window * self.batch_size
        each, rest = divmod(min(self.batch_size, self.size - start), self.shares)
        first = start + share * each + min(share, rest)
        return first, first + each + (share < rest)

    def indices(self, epoch: int, window: int) -> list[int]:
        """Returns the indices of all samples in a window, in all shares."""
        size = self.batch_size_at(epoch)
        return list(order(self.data, self.seed, epoch, size)[window * size : (window + 1) * size])

    def __iter__(self) -> Iterator[Request]:
        indices = order(self.data, self.seed, self.epoch, self.batch_size)
        for window in range(self.position, self.windows):
            pieces = self.micro_batches(window, self.share)
            whole = self.micro_batches(window, 0)
            for piece in (*pieces, *whole[:1] * (len(whole) - len(pieces))):
                yield self.epoch, list(indices[piece.start : piece.stop])


def cut(samples: range, size: int, least: int) -> list[range]:
    """Cuts the samples into pieces of `size`, the last with the rest.

    The last has at least `least` (1 or 2) samples, if the piece before it can spare them.
    """
    cuts = [*range(samples.start, samples.stop, size), samples.stop]
    if len(cuts) > 2 and samples.stop - cuts[-2] < least < size:
        cuts[-2] = samples.stop - least
    return [range(*pair) for pair in itertools.pairwise(cuts)]


class Fetch:
    """Reads the data set, here or in a worker: answers a `Request` with a batch."""

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
        # One thread as in a worker: a sum over many threads differs in its last bits.
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
    """A micro-batch of another rank, on which a rank without any left trains at weight zero.

    All ranks must call their model equally often.
    """

    batch: Any


def _ignore(kind: str, **fields: Any) -> None:
    pass


class Loader:
    """The windows of any epoch from any position, read by `num_workers` processes that live as long as the loader.

    With a GPU and no workers set, one process reads ahead, unless micro-batches are small and gathered from tensors in
    memory; if it is lost, this process goes on without it. `on_event(kind, **fields)` is called with the number of
    workers that was measured best, and for a worker that was lost.
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
        self._retries = config.data_retry
        if config.num_workers == "auto":
            count, self._reader, seconds = quickest(self._reading_with, self.sampler, config.prefetch)
            on_event("num_workers", chosen=count, seconds_per_micro_batch=seconds)
        elif config.num_workers == 0 and device.type == "cuda" and not self._is_quick(data):
            self._retries, self._reader = True, self._reading_with(1)
        else:
            self._reader = self._reading_with(0 if config.num_workers == "none" else config.num_workers)
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

    def _is_quick(self, data: Any) -> bool:
        """Returns True if a micro-batch is gathered from memory faster than another process would send it."""
        gathered = isinstance(data, TensorDataset) and self._fetch.augment is None
        return gathered and data.row_bytes * self.sampler.micro_batch_size < QUICK

    def _reading_with(self, num_workers: int) -> Reader:
        timeout, prefetch = self._config.data_timeout, self._config.prefetch
        if num_workers:
            return Workers(self._fetch, num_workers, timeout, self._pin, prefetch)
        return InProcess(self._fetch, timeout, self._pin)

    def epoch(self, epoch: int, position: int) -> Iterator[list[Any]]:
        """Yields the windows of `epoch` from `position` on: each a list of its micro-batches, still on the host.

        `waited` grows by the seconds that each took to arrive.
        """
        self.waited, start = 0.0, time.perf_counter()
        self.sampler.epoch, self.sampler.position = epoch, position
        batches = self._batches(self.sampler)
        micro_batches, share = self.sampler.micro_batches, self.sampler.share
        for window in range(position, self.sampler.windows):
            pieces = [next(batches) for _ in micro_batches(window, share)]
            if share > 0:
                pieces += [Filler(next(batches)) for _ in range(len(micro_batches(window, 0)) - len(pieces))]
            self.waited += time.perf_counter() - start
            yield pieces
            start = time.perf_counter()

    def first(self, micro_batch_size: int | None = None) -> Any:
        """Returns the first epoch's first samples, a micro-batch or the given number of them, read in this process."""
        sampler = self.sampler
        indices = order(sampler.data, sampler.seed, 0, sampler.batch_size_at(0))
        return next(self._reading_with(0).map([(0, list(indices[: micro_batch_size or sampler.micro_batch_size]))]))

    def _batches(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yields the requested batches; after a worker is lost, the rest from this process if that is configured."""
        taken = 0
        try:
            for batch in self._reader.map(requests):
                yield batch
                taken += 1
        except WorkerLost as lost:
            self._on_event("data_worker_lost", reason=str(lost), stack=lost.stack, retried=self._retries)
            if not self._retries:
                raise
            self._reader = self._reading_with(0)
            yield from self._reader.map(itertools.islice(requests, taken, None))

    def samples(self, position: int) -> int:
        """Returns how many samples the epoch holds from window `position` on."""
        last = min(self.sampler.size, self.sampler.windows * self.sampler.batch_size)
        return max(last - position * self.sampler.batch_size, 0)

    def close(self) -> None:
        """Ends the worker processes."""
        self._reader.close()


def training_set(task: Task) -> Any:
    """Returns the task's training data. Raises DataError if it cannot be read by index, or is empty."""
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
    """Returns the batch, as read on the host, with every tensor in it on `device`; other leaves as they are."""
    if device.type == "cpu":
        return batch
    return map_leaves(batch, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))
