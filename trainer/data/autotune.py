"""Chooses the fastest number of loader workers by a measurement of a few seconds."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator

from trainer.data.workers import Reader, Request

CANDIDATES = (0, 1, 2, 4)
MICRO_BATCHES = 24  # read by each candidate,
SECONDS = 1.0  # or as many as it reads in this time
GAIN = 0.9  # more workers must take less than this share of the time, since training needs the processors too


def quickest(
    reading_with: Callable[[int], Reader], requests: Iterable[Request], prefetch: int = 2, cpus: int | None = None
) -> tuple[int, Reader, dict[str, float]]:
    """Returns (number of workers, its reader, seconds per micro-batch of every number tried), at most the processors.

    Each candidate, whose workers read `prefetch` ahead, reads micro-batches that no other has read, so that the page
    cache favours none. If reading one here takes longer than SECONDS, the largest number is taken without measuring.
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
    """Returns the seconds per micro-batch after the first `warmup`, which wait for processes or were read ahead."""
    batches = reader.map(requests)
    for _ in range(warmup):
        next(batches)
    start, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
        if time.perf_counter() - start > SECONDS:
            break
    return (time.perf_counter() - start) / count
