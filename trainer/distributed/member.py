"""One rank among those of its trial, and the page on which they all show that they get on. Torch-free."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_WORD = 8


class Page:
    """Memory that the launcher and its ranks share: the wish that all leave, then a counter of each rank's progress."""

    def __init__(self, descriptor: int, world: int) -> None:
        size = (1 + world) * _WORD
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._words = memoryview(mmap.mmap(descriptor, size)).cast("Q")

    @property
    def leaving(self) -> bool:
        return self._words[0] != 0

    def ask_to_leave(self) -> None:
        self._words[0] = 1

    def beat(self, rank: int) -> None:
        """Rank `rank` has got on, and goes to wait for the others."""
        self._words[1 + rank] += 1

    def beats(self) -> tuple[int, ...]:
        return tuple(self._words[1:])


@dataclass(frozen=True)
class Member:
    """This process as rank `rank` of `world`, those of a host one after another."""

    rank: int
    world: int
    page: Page
    micro_batch_size: int | None = None  # at most, where the ranks have been started again for want of memory


_this: Member | None = None


def become(member: Member) -> None:
    """Make this process a rank, for good."""
    global _this
    _this = member


def this() -> Member | None:
    """This process's membership; None where it is no rank."""
    return _this
