"""Batch norm's running statistics, remembered and put back."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """Batch norm's running statistics. A forward pass has moved them before its window turns out to be skipped."""

    def __init__(self, model: nn.Module) -> None:
        norms = (module for module in model.modules() if isinstance(module, _NormBase))
        self._live = [buffer for norm in norms for buffer in norm.buffers()]
        self._before = [buffer.clone() for buffer in self._live]

    def remember(self) -> None:
        if self._live:
            torch._foreach_copy_(self._before, self._live)

    def restore(self) -> None:
        """Back to what was remembered."""
        if self._live:
            torch._foreach_copy_(self._live, self._before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Passes inside leave the statistics as they found them."""
        kept = [buffer.clone() for buffer in self._live]
        try:
            yield
        finally:
            if kept:
                torch._foreach_copy_(self._live, kept)

    def restore_unless(self, finite: Tensor) -> None:
        """The same where the device says that the window was not finite, without waiting for it."""
        for live, before in zip(self._live, self._before, strict=True):
            live.copy_(torch.where(finite, live, before))
