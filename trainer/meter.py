"""The running epoch's numbers, and the count of steps that were not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.config import ClipConfig, GuardConfig
from trainer.errors import TrainerError
from trainer.gradients import Window

PER_STEP = ("grad_norm", "clipped")  # means over steps; the other means are over the loss's own count
COUNTS = ("skipped_steps", "empty_steps")
OWN = {f"train/{name}" for name in ("loss", "lr", "samples_per_sec", *PER_STEP, *COUNTS)}


class Meter:
    """Sums up windows into the epoch's `train/...` metrics.

    Windows are kept as the tensors they are, on their device, and read in blocks (`drain`), so no step waits for the
    device. They are added one by one in float64 and in order, so when they are read changes no sum.

    `consecutive` is the number of windows in a row, up to the last, whose loss or gradient was not finite;
    `gave_up` says that it has reached the guard's limit.
    """

    def __init__(self, clip: ClipConfig, guard: GuardConfig) -> None:
        self.clip_norm = math.inf if clip.norm is None else clip.norm
        self.limit = guard.max_consecutive
        self.consecutive = 0
        self.gave_up = False
        self.sums: dict[str, float] = {}
        self._pending: list[tuple[Window, float | Tensor]] = []

    def add(self, window: Window, norm: float | Tensor) -> None:
        """Take in a window and the norm of its gradient, unread."""
        self._pending.append((window, norm))

    def drain(self) -> list[bool]:
        """Read what is pending: for each window, whether it was finite and thus trained on. One wait for the device."""
        windows, self._pending = self._pending, []
        rows = _read([[w.loss, w.count, norm, *w.terms.values()] for w, norm in windows])
        return [self._take(w.terms, *row) for (w, _), row in zip(windows, rows, strict=True)]

    def _take(self, names: Iterable[str], loss: float, count: float, norm: float, *terms: float) -> bool:
        sums = self.sums
        if count == 0:
            sums["empty_steps"] = sums.get("empty_steps", 0) + 1
            return False
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.consecutive += 1
            self.gave_up |= self.consecutive >= self.limit
            sums["skipped_steps"] = sums.get("skipped_steps", 0) + 1
            return False
        self.consecutive = 0
        sums["steps"] = sums.get("steps", 0) + 1
        sums["count"] = sums.get("count", 0.0) + count
        sums["loss"] = sums.get("loss", 0.0) + loss
        sums["grad_norm"] = sums.get("grad_norm", 0.0) + norm
        sums["clipped"] = sums.get("clipped", 0) + (norm > self.clip_norm)
        for name, value in zip(names, terms, strict=True):
            sums[f"term/{name}"] = sums.get(f"term/{name}", 0.0) + value
        return True

    def metrics(self) -> dict[str, float]:
        """The epoch's metrics so far: means over what was trained on, NaN where nothing was, and counts of the rest."""
        sums = dict.fromkeys(("loss", "count", "steps", *PER_STEP, *COUNTS), 0.0) | self.sums
        count, steps = sums.pop("count"), sums.pop("steps")
        metrics = {f"train/{name}": sums.pop(name) for name in COUNTS}
        for name, value in sums.items():
            key = f"train/{name.removeprefix('term/')}"
            if name.startswith("term/") and key in OWN:
                raise TrainerError(f"Task.loss has a term named {key[6:]!r}, which is the trainer's own: rename it.")
            metrics[key] = value / (steps if name in PER_STEP else count) if steps else math.nan
        return metrics

    def new_epoch(self) -> None:
        self.sums = {}

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self.sums)}

    def load(self, state: dict[str, Any]) -> None:
        self.sums = dict(state["sums"])


def _read(rows: list[list[float | Tensor]]) -> list[list[float]]:
    """The rows as floats; tensors on a device come over in one transfer."""
    tensors = [value for row in rows for value in row if isinstance(value, Tensor)]
    if tensors and tensors[0].device.type != "cpu":
        values = iter(torch.stack([t.double() for t in tensors]).tolist())
    else:
        values = (t.item() for t in tensors)
    return [[next(values) if isinstance(v, Tensor) else v for v in row] for row in rows]
