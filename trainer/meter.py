"""The running epoch's numbers, and the count of steps that were not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.config import ClipConfig, GuardConfig
from trainer.errors import TrainerError
from trainer.gradients import Window

PER_STEP = ("grad_norm", "clipped")  # means over steps; the other means are over the loss's own count
COUNTS = ("skipped_steps", "empty_steps")


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
        self._pending: list[tuple[Window, Tensor]] = []

    def add(self, window: Window, norm: Tensor) -> None:
        """Take in a window and the norm of its gradient, unread."""
        self._pending.append((window, norm))

    def drain(self) -> list[bool]:
        """Read what is pending: for each window, whether it was finite and thus trained on. One wait for the device."""
        windows, self._pending = self._pending, []
        rows = _read([{"loss": w.loss, "count": w.count, "norm": norm, **_terms(w)} for w, norm in windows])
        return [self._take(row) for row in rows]

    def _take(self, row: dict[str, float]) -> bool:
        count, norm = row["count"], row.pop("norm")
        if count == 0:
            self._add({"empty_steps": 1})
            return False
        if not (math.isfinite(norm) and math.isfinite(row["loss"])):
            self.consecutive += 1
            self.gave_up |= self.consecutive >= self.limit
            self._add({"skipped_steps": 1})
            return False
        self.consecutive = 0
        self._add({**row, "steps": 1, "grad_norm": norm, "clipped": norm > self.clip_norm})
        return True

    def _add(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """The epoch's metrics so far: means over what was trained on, NaN where nothing was, and counts of the rest."""
        sums = dict.fromkeys(("loss", "count", "steps", *PER_STEP, *COUNTS), 0.0) | self.sums
        count, steps = sums.pop("count"), sums.pop("steps")
        metrics = {f"train/{name}": sums.pop(name) for name in COUNTS}
        for name, value in sums.items():
            key = f"train/{name.removeprefix('term/')}"
            if key in metrics:
                raise TrainerError(f"Task.loss has a term named {key[6:]!r}, which is the trainer's own: rename it.")
            metrics[key] = value / (steps if name in PER_STEP else count) if steps else math.nan
        return metrics

    def new_epoch(self) -> None:
        self.sums = {}

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self.sums)}

    def load(self, state: dict[str, Any]) -> None:
        self.sums = dict(state["sums"])


def _terms(window: Window) -> dict[str, Tensor]:
    return {f"term/{name}": term for name, term in window.terms.items()}


def _read(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The rows as floats; tensors on a device come over in one transfer."""
    tensors = [value for row in rows for value in row.values() if isinstance(value, Tensor)]
    if tensors and tensors[0].device.type != "cpu":
        values = iter(torch.stack([t.double() for t in tensors]).tolist())
    else:
        values = (t.item() for t in tensors)
    return [{k: next(values) if isinstance(v, Tensor) else float(v) for k, v in row.items()} for row in rows]
