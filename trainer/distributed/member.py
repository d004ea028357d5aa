"""One rank's membership in its trial, and the page on which all ranks record their progress. Torch-free."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_WORD = 8


class Page:
    """Memory that the launcher and its ranks share: the request to leave, then a progress counter for each rank."""

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
        """Counts one step of progress of rank `rank`, before it waits for the others."""
        self._words[1 + rank] += 1

    def beats(self) -> tuple[int, ...]:
        return tuple(self._words[1:])


@dataclass(frozen=True)
class Member:
    """This process as rank `rank` of `world`; the ranks of a host are numbered consecutively."""

    rank: int
    world: int
    page: Page
    micro_batch_size: int | None = None  # upper limit, set when the ranks were restarted after running out of memory


_this: Member | None = None


def become(member: Member) -> None:
    """Makes this process a rank, for good."""
    global _this
    _this = member


def this() -> Member | None:
    """Returns this process's membership; None if it is not a rank."""
    return _this
