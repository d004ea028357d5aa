"""Sums up the running epoch's numbers, and counts the steps that were not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.config import ClipConfig, GuardConfig
from trainer.errors import TrainerError
from trainer.runtime.window import Window

PER_STEP = ("grad_norm", "clipped")  # means over steps; other means are over the loss's count
COUNTS = ("skipped_steps", "empty_steps")
NOISE = ("noise/square", "noise/trace")  # sums of |G|^2 and tr(Sigma), whose ratio is the noise scale
RESERVED = {f"train/{name}" for name in ("loss", "lr", "samples_per_sec", "noise_scale", *PER_STEP, *COUNTS)}


class Meter:
    """Sums up windows into the epoch's `train/...` metrics.

    Windows stay tensors on their device until `drain` reads them in blocks, so no step waits for the device. They are
    added one by one in float64 and in order, so the time of reading does not change the sums.

    `consecutive` is the number of windows in a row, up to the last, whose loss or gradient was not finite, without the
    overflows to which fp16's loss scale responds. `gave_up` is true once it has reached the guard's limit. `turned_bad`
    has the first step of each such row, until the caller that reports them removes them. `steps` counts all windows of
    the trial by their outcome.
    """

    def __init__(self, clip: ClipConfig, guard: GuardConfig) -> None:
        self.clip_norm = math.inf if clip.norm is None else clip.norm
        self.limit = guard.max_consecutive
        self.consecutive = 0
        self.gave_up = False
        self.turned_bad: list[int] = []
        self.begin()
        self.sums: dict[str, float] = {}
        self._pending: list[tuple[int, Window, float | Tensor]] = []

    def begin(self) -> None:
        """Resets the counts of steps at the beginning of a trial."""
        self.steps = dict.fromkeys(("trained", "skipped", "empty"), 0)

    def add(self, step: int, window: Window, norm: float | Tensor) -> None:
        """Records a step's window and the norm of its gradient, unread."""
        self._pending.append((step, window, norm))

    def drain(self) -> list[bool]:
        """Reads the pending windows, waiting for the device once; returns for each whether it was finite and trained
        on."""
        pending, self._pending = self._pending, []
        rows = [_row(window, norm) for _, window, norm in pending]
        values = _read([[*row.values()] for row in rows])
        trained = []
        for (step, *_), row, read in zip(pending, rows, values, strict=True):
            before = self.consecutive
            trained.append(self._take(**dict(zip(row, read, strict=True))))
            if self.consecutive > 0 and before == 0:
                self.turned_bad.append(step)
        return trained

    def _take(
        self,
        *,
        loss: float,
        count: float,
        norm: float,
        norm_divisor: float,
        met: float | None = None,
        answered: float = False,
        **others: float,
    ) -> bool:
        sums, norm = self.sums, norm / norm_divisor
        if count == 0:
            self.steps["empty"] += 1
            sums["empty_steps"] = sums.get("empty_steps", 0) + 1
            return False
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.consecutive += not (answered and math.isfinite(loss))
            self.gave_up |= self.consecutive >= self.limit
            self.steps["skipped"] += 1
            sums["skipped_steps"] = sums.get("skipped_steps", 0) + 1
            return False
        self.consecutive = 0
        self.steps["trained"] += 1
        sums["steps"] = sums.get("steps", 0) + 1
        sums["count"] = sums.get("count", 0.0) + count
        sums["loss"] = sums.get("loss", 0.0) + loss
        sums["grad_norm"] = sums.get("grad_norm", 0.0) + norm
        sums["clipped"] = sums.get("clipped", 0) + ((norm if met is None else met) > self.clip_norm)
        for name, value in others.items():
            if name not in NOISE or math.isfinite(value):
                sums[name] = sums.get(name, 0.0) + value
            if name not in NOISE:
                sums[f"count/{name}"] = sums.get(f"count/{name}", 0.0) + count
        return True

    @property
    def untrained(self) -> str:
        """Returns a sentence about why no step changed the weights; empty if a step was trained on."""
        total = sum(self.steps.values())
        if self.steps["trained"] or not total:
            return ""
        return (
            f"none of the {total} steps was trained on: in {self.steps['skipped']} the loss or gradient was not "
            f"finite, and {self.steps['empty']} had nothing to learn from (a Loss whose count is 0); "
            "train.guard.max_consecutive=1 ends at the first of the former and names the module."
        )

    def metrics(self) -> dict[str, float]:
        """Returns the epoch's metrics so far: means over trained windows, NaN without any, and counts of the rest."""
        sums = dict.fromkeys(("loss", "count", "steps", *PER_STEP, *COUNTS), 0.0) | self.sums
        count, steps = sums.pop("count"), sums.pop("steps")
        metrics = {f"train/{name}": sums.pop(name) for name in COUNTS}
        if NOISE[0] in sums:
            square, trace = (sums.pop(name) for name in NOISE)
            metrics["train/noise_scale"] = trace / square if square > 0 else math.nan
        for name, value in sums.items():
            if name.startswith("count/"):  # counts the windows that had the term: a phase may begin within an epoch
                continue
            key = f"train/{name.removeprefix('term/')}"
            if name.startswith("term/") and key in RESERVED:
                raise TrainerError(f"Task.loss has a term named {key[6:]!r}, which is the trainer's own: rename it.")
            divisor = steps if name in PER_STEP else sums.get(f"count/{name}", count)
            metrics[key] = value / divisor if steps else math.nan
        return metrics

    def new_epoch(self) -> None:
        self.sums = {}

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self.sums)}

    def load(self, state: dict[str, Any]) -> None:
        self.sums = dict(state["sums"])


def _row(window: Window, norm: float | Tensor) -> dict[str, float | Tensor]:
    """Returns the numbers of a window by the names of the arguments of `Meter._take` to which they are passed."""
    row: dict[str, float | Tensor] = {"loss": window.loss, "count": window.count, "norm": norm}
    row["norm_divisor"] = window.norm_divisor
    row |= {} if window.met is None else {"met": window.met}
    row |= {} if window.answered is None else {"answered": window.answered}
    row |= dict(zip(NOISE, window.noise, strict=True)) if window.noise else {}
    return row | {f"term/{name}": value for name, value in window.terms.items()}


def _read(rows: list[list[float | Tensor]]) -> list[list[float]]:
    """Returns the rows as floats, with one transfer for each type of several rows' tensors, or of a device's.

    No tensor is converted, since each conversion would be a launch.
    """
    tensors = [value for row in rows for value in row if isinstance(value, Tensor)]
    if len(rows) == 1 and all(t.device.type == "cpu" for t in tensors[:1]):
        return [[v.item() if isinstance(v, Tensor) else v for v in rows[0]]]
    alike = {kind: torch.stack([t for t in tensors if t.dtype == kind]) for kind in {t.dtype for t in tensors}}
    values = {kind: iter(stacked.tolist()) for kind, stacked in alike.items()}
    return [[next(values[v.dtype]) if isinstance(v, Tensor) else v for v in row] for row in rows]
