"""Chooses the number of loader workers that reads quickest here, by a measurement of a few seconds."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator

from trainer.data.workers import Reader, Request

CANDIDATES = (0, 1, 2, 4)
MICRO_BATCHES = 24  # that each candidate reads,
SECONDS = 1.0  # or as many as it can in this time
GAIN = 0.9  # more workers must take less than this share of the time: they share the processors with the training


def quickest(
    reading_with: Callable[[int], Reader], requests: Iterable[Request], prefetch: int = 2, cpus: int | None = None
) -> tuple[int, Reader, dict[str, float]]:
    """(number of workers, its reader, seconds per micro-batch of every number tried), at most as many as processors.

    Each candidate, whose workers have `prefetch` at hand, reads micro-batches that no other has read: what is in the
    page cache favours none. Where reading one here takes longer than SECONDS, as many workers as may be are taken
    without measuring them.
    """
    cpus = cpus or len(os.sched_getaffinity(0))
    candidates = [count for count in CANDIDATES if count <= cpus]
    endless = _endless(requests)
    seconds: dict[str, float] = {}
    best, reader = 0, reading_with(0)
    seconds["0"] = _seconds_each(reader, list(itertools.islice(endless, MICRO_BATCHES)), 0)
    if seconds["0"] > SECONDS:
        return candidates[-1], reading_with(candidates[-1]), seconds
    for count in candidates[1:]:
        other, warmup = reading_with(count), count * prefetch
        seconds[str(count)] = _seconds_each(other, list(itertools.islice(endless, warmup + MICRO_BATCHES)), warmup)
        if seconds[str(count)] < GAIN * seconds[str(best)]:
            best, reader, other = count, other, reader
        other.close()
    return best, reader, seconds


def _endless(requests: Iterable[Request]) -> Iterator[Request]:
    while True:
        yield from requests


def _seconds_each(reader: Reader, requests: list[Request], warmup: int) -> float:
    """Seconds per micro-batch, after the first `warmup`, which wait for processes to start or were read meanwhile."""
    batches = reader.map(requests)
    for _ in range(warmup):
        next(batches)
    start, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
        if time.perf_counter() - start > SECONDS:
            break
    return (time.perf_counter() - start) / count
