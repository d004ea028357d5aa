"""Shows a training run's progress in one line, from numbers that the host already has, without waiting for the device.

Step 5000/100000 | loss 2.347 | ppl 10.45 | lr 2.8e-4 | 1.24M tok/s | mem 72/80 GB | grad norm 0.67 | clipped 0.3% |
data 1.2% | ETA 22h15m

with Display() as display:
    fit(task, config, reporter, checkpoints, watch=display)
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

ON_TERMINAL, ELSEWHERE = 1.0, 60.0  # seconds between two lines
_MEANS = ("loss", "grad_norm", "clipped", "count", "steps")  # of the meter's sums


@dataclass(frozen=True)
class Numbers:
    """The numbers of the line. `loss` to `data` cover the time since the previous line; None is left out.

    `rate` is per second in `unit`; `memory` is (in use, in all) in bytes; `clipped` and `data`, the time spent waiting
    for data, are shares; `left` is in seconds.
    """

    step: int
    total: int
    loss: float
    lr: float
    rate: float
    unit: str
    grad_norm: float
    clipped: float | None
    data: float
    left: float
    memory: tuple[int, int] | None = None

    def __str__(self) -> str:
        of_tokens = self.unit == "tokens"
        parts = {
            "Step": f"{self.step}/{self.total}",
            "loss": f"{self.loss:.4g}",
            "ppl": f"{_exp(self.loss):.4g}" if of_tokens else None,
            "lr": _scientific(self.lr),
            "": f"{_short(self.rate)} {'tok' if of_tokens else self.unit}/s",
            "mem": None if self.memory is None else "/".join(map(_gigabytes, self.memory)) + " GB",
            "grad norm": f"{self.grad_norm:.3g}",
            "clipped": None if self.clipped is None else f"{self.clipped:.1%}",
            "data": f"{self.data:.1%}",
            "ETA": _duration(self.left),
        }
        return " | ".join(f"{name} {value}".strip() for name, value in parts.items() if value is not None)


class Running(Protocol):
    """The part of a fit (`trainer.loop.Fit`) that the line reads."""

    task: Any
    config: Any
    state: Any
    loader: Any
    device: torch.device
    total: int

    def lr(self, step: int) -> float: ...


class Display:
    """Shows the line of a run every `every` seconds, and once more after its last step.

    It writes to standard error: on a terminal in place, every second, else a line a minute. `show` is called with the
    text instead. A fit calls the display before its first step, when the counting starts, and after each step.
    """

    def __init__(self, show: Callable[[str], None] | None = None, every: float | None = None) -> None:
        terminal = sys.stderr.isatty()
        self._in_place = show is None and terminal
        self._show = show or (_rewrite if terminal else lambda text: print(text, file=sys.stderr, flush=True))
        self._every = every if every is not None else ON_TERMINAL if terminal or show else ELSEWHERE
        self._fit: weakref.ref[Running] | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        """Keeps the last line on the terminal."""
        if self._in_place and self._fit is not None:
            print(file=sys.stderr, flush=True)

    def __call__(self, fit: Running) -> None:
        now, sums, waited = time.perf_counter(), fit.state.meter.sums, fit.loader.waited
        if self._fit is None or self._fit() is not fit:
            self._begin(fit, now)
        if sums is not self._sums:  # an epoch has begun: the meter and the loader count from 0 again
            self._add(self._sums, 1)
            self._sums = sums
        if waited < self._waited:
            self._carried += self._waited
        self._waited = waited
        if fit.state.step > self._step and (now >= self._due or fit.state.step >= fit.total):
            self._show(str(self._numbers(fit, now)))
            self._since(fit, now)

    def _begin(self, fit: Running, now: float) -> None:
        self._fit, self._start, self._first = weakref.ref(fit), now, fit.state.step
        self._sums, self._waited = fit.state.meter.sums, fit.loader.waited
        self._since(fit, now)

    def _since(self, fit: Running, now: float) -> None:
        """Starts the counts of the next line."""
        self._due, self._at, self._step = now + self._every, now, fit.state.step
        self._counted = dict.fromkeys(_MEANS, 0.0)
        self._carried = -self._waited
        self._add(self._sums, -1)

    def _add(self, sums: dict[str, float], sign: int) -> None:
        for name in _MEANS:
            self._counted[name] += sign * sums.get(name, 0.0)

    def _numbers(self, fit: Running, now: float) -> Numbers:
        self._add(self._sums, 1)
        c, s, seconds = self._counted, fit.state, max(now - self._at, 1e-9)
        done = s.step - self._first
        steps = c["steps"] or math.nan
        return Numbers(
            step=s.step,
            total=fit.total,
            loss=c["loss"] / (c["count"] or math.nan),
            lr=fit.lr(s.step - 1),
            rate=c["count"] / seconds,
            unit=fit.task.unit,
            grad_norm=c["grad_norm"] / steps,
            clipped=None if fit.config.clip.norm is None else c["clipped"] / steps,
            data=(self._carried + self._waited) / seconds,
            left=(fit.total - s.step) * (now - self._start) / done if done else math.nan,
            memory=_memory(fit.device),
        )


def _rewrite(text: str) -> None:
    """Writes the text over the previous line, cut to the terminal's width."""
    width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    print(f"\r{text[: width - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def _memory(device: torch.device) -> tuple[int, int] | None:
    """Returns the memory (used, in all) in bytes: torch's on the GPU, or this process's; None if unknown."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return int(statm.read_text().split()[1]) * page, os.sysconf("SC_PHYS_PAGES") * page


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)


def _scientific(value: float) -> str:
    """Formats a number like `2.8e-4`."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _short(value: float) -> str:
    """Formats a number in three digits, like `1.24M`."""
    power = min(max(int(math.log10(value) // 3), 0), 3) if value > 0 else 0
    scaled = value / 1000**power
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:.{digits}f}{['', 'K', 'M', 'G'][power]}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.0f}" if size >= 10e9 else f"{size / 1e9:.1f}"


def _duration(seconds: float) -> str:
    """Formats a duration in its two largest units, like `22h15m`."""
    if not math.isfinite(seconds):
        return "?"
    left = round(seconds)
    for name, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if left >= size:
            return f"{left // size}{name}{left % size // part:02}{smaller}"
    return f"{left}s"
