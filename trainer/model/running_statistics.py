"""Remembers and restores batch norm's running statistics."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.compat.modules import Norm

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class RunningStatistics:
    """Holds batch norm's running statistics, which a forward pass changes before its window may be skipped."""

    def __init__(self, model: nn.Module) -> None:
        norms = (module for module in model.modules() if isinstance(module, Norm))
        self._live = [buffer for norm in norms for buffer in norm.buffers()]
        self._before = [buffer.clone() for buffer in self._live]

    def remember(self) -> None:
        if self._live:
            foreach.copy_(self._before, self._live)

    def restore(self) -> None:
        """Restores the remembered statistics."""
        if self._live:
            foreach.copy_(self._live, self._before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restores the statistics after passes within the block."""
        kept = [buffer.clone() for buffer in self._live]
        try:
            yield
        finally:
            if kept:
                foreach.copy_(self._live, kept)

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        """Restores the statistics if `bad` on the device is 1, and not if it is 0, without waiting for it.

        Unlike arithmetic on NaN, the difference of the bits is exact: live + bad * (before - live), in integers that
        wrap around, in three launches for all buffers of a size.
        """
        for live, before in self._bits:
            change = foreach.sub(before, live)
            foreach.mul_(change, bad.to(live[0].dtype))
            foreach.add_(live, change)

    @cached_property
    def _bits(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Returns the live and the remembered buffers of each element size, as integers."""
        sizes = {buffer.element_size() for buffer in self._live}
        return [(_of_size(size, self._live), _of_size(size, self._before)) for size in sizes]


def _of_size(size: int, buffers: list[Tensor]) -> list[Tensor]:
    return [buffer.view(_WHOLE[size]) for buffer in buffers if buffer.element_size() == size]
