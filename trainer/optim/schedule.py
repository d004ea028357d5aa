"""Computes learning rates as functions of the step.

Step s is the number of optimizer steps already done (0 at the first update), T their total, W the length of the
warmup, E the steps of an epoch (where batches grow, s/E is the number of epochs in s steps), p = (s - W)/(T - W) the
progress after the warmup. A warmup is a function of (s + 1)/(W + 1): the first update already moves, and it meets the
schedule at s = W.

    constant         1
    cosine           (1 + cos pi p)/2, down to min_lr (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts)
    cosine_restarts  the same over `num_cycles` cycles, each `cycle_mult` times as long as the one before (ibid.)
    one_cycle        cosine from 1/div up to 1 at s = W, cosine down to 1/(div * final_div) at s = T - 1 (Smith &
                     Topin, arXiv 1708.07120; torch's OneCycleLR); with `momentum` that falls and rises the other way
    polynomial       (1 - p)^power, down to min_lr (power 0.9: Chen et al. 2017, arXiv 1606.00915)
    linear           1 - p, down to min_lr
    exponential      gamma^((s - W)/E)
    step             gamma^k after k * step_size epochs (He et al. 2016, arXiv 1512.03385)
    multi_step       gamma^k after k of the milestones, epochs (ibid.)
    inverse_sqrt     sqrt(tau/(s - W + tau)), tau = `timescale` or W + 1 (Vaswani et al. 2017, arXiv 1706.03762, eq. 3,
                     whose step is s + 1 and whose warmup W + 1; so without either it is 1/sqrt(s + 1))
    wsd              1, and in the last `decay_ratio` of the run, with progress q, 1 - sqrt q, 1 - q or
                     (1 + cos pi q)/2, down to min_lr (Hu et al. 2024, arXiv 2404.06395; Hägele et al. 2024, arXiv
                     2405.18392)
    cyclical         `num_cycles` triangles from min_lr to lr and back, of full height, each of half the height, or
                     times gamma^((s - W)/E) (Smith 2017, arXiv 1506.01186; torch's CyclicLR)
    plateau          1, times `factor` at each plateau of the monitored metric
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config import PlateauConfig, ScheduleConfig
from trainer.errors import ConfigError
from trainer.runtime.compare import improved
from trainer.runtime.dotted import check_call, named
from trainer.runtime.epochs import Epochs

Rate = Callable[[float], float]  # step -> learning rate
FIELD = "train.schedule.name"


@dataclass(frozen=True)
class Run:
    """The run that a schedule covers: its peak and, in steps, the warmup, the whole run and its epochs."""

    lr: float
    warmup: float
    total: int
    lengths: Epochs

    @property
    def fall(self) -> float:
        """Returns the number of steps after the warmup, at least 1."""
        return max(self.total - self.warmup, 1)

    def progress(self, step: float) -> float:
        """Returns the progress after the warmup: 0 at its end, 1 at the end of the run and later."""
        return min((step - self.warmup) / self.fall, 1.0)

    def epochs(self, step: float) -> float:
        """Returns the number of epochs since the end of the warmup."""
        return self.lengths.epoch(step) - self.lengths.epoch(self.warmup)


def warmup_length(config: ScheduleConfig, total: int, lengths: Epochs) -> float:
    """Returns the warmup's length in steps, however it is configured; for one_cycle its rise, by default torch's."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    if config.warmup_epochs is not None:
        return round(lengths.step(config.warmup_epochs))
    if config.warmup_ratio is not None:
        return round(config.warmup_ratio * total)
    return max(config.one_cycle.pct_start * total - 1, 0.0) if config.name == "one_cycle" else 0


def never_warm(config: ScheduleConfig, total: int, lengths: Epochs) -> str:
    """Returns a clause that says that the warmup outlasts the run; empty if it does not."""
    length = warmup_length(config, total, lengths)
    if length < total:
        return ""
    return (
        f"the warmup of {length:g} steps outlasts the run of {total}, so train.optim.lr is never reached: shorten "
        "train.schedule.warmup_*, or train for longer"
    )


def scaled_lr(config: ScheduleConfig, lr: float, batch_size: int) -> float:
    """Returns the peak for `batch_size`: `lr` times its ratio to `base_batch_size`, or times the root of the ratio.

    Goyal et al. 2017, arXiv 1706.02677, for the ratio; Krizhevsky 2014, arXiv 1404.5997, for the root; for Adam,
    Malladi et al. 2022, arXiv 2205.10330.
    """
    ratio = batch_size / (config.base_batch_size or 256)
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scale_lr]


def schedule(config: ScheduleConfig, lr: float, total: int, lengths: Epochs) -> Rate:
    """Returns the learning rate as a function of the step on [0, total]; for plateau, before its scaling.

    `lr` is the peak, `total` the number of optimizer steps of the run, `lengths` its epochs. The function is continuous
    except at the steps of step and multi_step and the restarts of cosine_restarts. Raises ConfigError for a user's
    function that cannot be used.
    """
    run = Run(lr, warmup_length(config, total, lengths), total, lengths)
    decay = (SCHEDULES.get(config.name) or _own)(config, run)
    if run.warmup == 0 or config.name == "one_cycle":
        return decay
    top = decay(run.warmup)
    if math.isclose(top, lr, rel_tol=1e-12):
        top = lr  # without the rounding of floor + (lr - floor)
    rise, length = WARMUPS[config.warmup], run.warmup
    return lambda step: rise(config, top, step + 1, length + 1) if step < length else decay(step)


# --- Warmups: up to `top` at n = length


WARMUPS: dict[str, Callable[[ScheduleConfig, float, float, float], float]] = {
    "linear": lambda c, top, n, length: top * n / length,
    "cosine": lambda c, top, n, length: top * (1 - math.cos(math.pi * n / length)) / 2,
    "polynomial": lambda c, top, n, length: top * (n / length) ** (c.warmup_power or 2.0),
    "exponential": lambda c, top, n, length: top * (c.warmup_start or 0.01) ** (1 - n / length),
}


# --- Schedules after the warmup


def _cosine(start: float, end: float, progress: float) -> float:
    """Returns the value of half a cosine from `start` at progress 0 to `end` at 1, flat after that."""
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def _floor(c: ScheduleConfig, run: Run) -> float:
    return min(c.own("min_lr"), run.lr)


def constant(c: ScheduleConfig, run: Run) -> Rate:
    return lambda step: run.lr


def cosine(c: ScheduleConfig, run: Run) -> Rate:
    floor = _floor(c, run)
    return lambda step: _cosine(run.lr, floor, run.progress(step))


def cosine_restarts(c: ScheduleConfig, run: Run) -> Rate:
    floor, mult = _floor(c, run), c.own("cycle_mult")
    lengths = [mult**i for i in range(c.own("num_cycles"))]
    starts = [run.fall * sum(lengths[:i]) / sum(lengths) for i in range(len(lengths) + 1)]

    def rate(step: float) -> float:
        i = min(max(bisect_right(starts, step - run.warmup) - 1, 0), len(lengths) - 1)
        return _cosine(run.lr, floor, (step - run.warmup - starts[i]) / (starts[i + 1] - starts[i]))

    return rate


def one_cycle(c: ScheduleConfig, run: Run) -> Rate:
    low = run.lr / c.one_cycle.div_factor
    end = low / c.one_cycle.final_div_factor
    rise, fall = run.warmup, max(run.total - 1 - run.warmup, 1)
    return lambda step: _cosine(low, run.lr, step / rise) if step < rise else _cosine(run.lr, end, (step - rise) / fall)


def momentum(config: ScheduleConfig, total: int, lengths: Epochs) -> Rate | None:
    """Returns one_cycle's momentum as a function of the step; None if the schedule does not change it."""
    if not config.cycles_momentum or config.one_cycle.momentum is None:
        return None
    (low, high), rise = config.one_cycle.momentum, warmup_length(config, total, lengths)
    fall = max(total - 1 - rise, 1)
    return lambda step: _cosine(high, low, step / rise) if step < rise else _cosine(low, high, (step - rise) / fall)


def set_momentum(group: dict[str, Any], value: float) -> None:
    """Sets the momentum of an optimizer's group, which is the first of its betas where it has no other."""
    if "momentum" in group:
        group["momentum"] = value
    else:
        group["betas"] = (value, group["betas"][1])


def polynomial(c: ScheduleConfig, run: Run) -> Rate:
    floor, power = _floor(c, run), c.own("power")
    return lambda step: floor + (run.lr - floor) * (1 - run.progress(step)) ** power


def linear(c: ScheduleConfig, run: Run) -> Rate:
    floor = _floor(c, run)
    return lambda step: floor + (run.lr - floor) * (1 - run.progress(step))


def exponential(c: ScheduleConfig, run: Run) -> Rate:
    floor, gamma = _floor(c, run), c.own("gamma")
    return lambda step: max(run.lr * gamma ** run.epochs(step), floor)


def step(c: ScheduleConfig, run: Run) -> Rate:
    floor, gamma, epochs = _floor(c, run), c.own("gamma"), c.own("step_size")
    if epochs is None:
        third = -(-run.total // 3)
        return lambda step: max(run.lr * gamma ** (step // third), floor)
    # Round up a step that ends an epoch: 7/10 epochs are 7 times 0.1.
    return lambda step: max(run.lr * gamma ** math.floor(run.lengths.epoch(step) / epochs + 1e-9), floor)


def multi_step(c: ScheduleConfig, run: Run) -> Rate:
    floor, gamma, epochs = _floor(c, run), c.own("gamma"), c.own("milestones")
    drops = (0.5 * run.total, 0.75 * run.total) if epochs is None else [run.lengths.step(e) for e in epochs]
    milestones = [round(milestone) for milestone in drops]
    return lambda step: max(run.lr * gamma ** bisect_right(milestones, step), floor)


def inverse_sqrt(c: ScheduleConfig, run: Run) -> Rate:
    floor, tau = _floor(c, run), c.own("timescale") or run.warmup + 1
    return lambda step: max(run.lr * math.sqrt(tau / (step - run.warmup + tau)), floor)


_WSD_SHAPES: dict[str, Callable[[float], float]] = {
    "sqrt": lambda q: 1 - math.sqrt(q),
    "linear": lambda q: 1 - q,
    "cosine": lambda q: _cosine(1.0, 0.0, q),
}


def wsd(c: ScheduleConfig, run: Run) -> Rate:
    floor, shape = _floor(c, run), _WSD_SHAPES[c.own("decay_shape")]
    length = min(c.own("decay_ratio") * run.total, run.fall)
    start = run.warmup + run.fall - length

    def rate(step: float) -> float:
        return run.lr if step <= start else floor + (run.lr - floor) * shape(min((step - start) / length, 1.0))

    return rate


def cyclical(c: ScheduleConfig, run: Run) -> Rate:
    low = run.lr / 4 if c.min_lr is None else _floor(c, run)
    cycles, mode, gamma = c.own("num_cycles"), c.own("cycle_mode"), c.own("gamma")

    def rate(step: float) -> float:
        done = cycles * run.progress(step)
        height = 1 - abs(2 * (done % 1) - 1)
        if mode == "triangular2":
            height /= 2 ** int(done)
        elif mode == "exp_range":
            height *= gamma ** run.epochs(step)
        return low + (run.lr - low) * height

    return rate


def users_own(name: str) -> Callable[[ScheduleConfig, Run], Any]:
    """Returns the user's `package.module:function`, which takes the configuration and the run.

    Raises ConfigError if it does not take these.
    """
    make = named(name, FIELD)
    check_call(make, f"{FIELD}={name!r}", "let it take two arguments, the configuration and the run", None, None)
    return make


def _own(c: ScheduleConfig, run: Run) -> Rate:
    rate: Any = users_own(c.name)(c, run)
    if not callable(rate):
        raise ConfigError(f"{FIELD}={c.name!r} returns {rate!r}: return a function of the step.")
    check_call(rate, f"what {FIELD}={c.name!r} returns", "let it take one argument, the step", 0)
    for point in (run.warmup, run.total):
        value: Any = rate(point)
        if not hasattr(value, "__float__") or not 0 <= value < math.inf:
            raise ConfigError(
                f"{FIELD}={c.name!r} gives the rate {value!r} at step {point}: make it a number, finite and at least 0."
            )
    return rate  # type: ignore[return-value]


SCHEDULES: dict[str, Callable[[ScheduleConfig, Run], Rate]] = {
    "constant": constant,
    "cosine": cosine,
    "cosine_restarts": cosine_restarts,
    "one_cycle": one_cycle,
    "polynomial": polynomial,
    "linear": linear,
    "exponential": exponential,
    "step": step,
    "multi_step": multi_step,
    "inverse_sqrt": inverse_sqrt,
    "wsd": wsd,
    "cyclical": cyclical,
    "plateau": constant,
}


class Plateau:
    """Scales the learning rate down when a metric stops improving.

    For positive metrics it acts as torch's ReduceLROnPlateau does with a relative threshold. A negative metric must
    improve by threshold |best| too, whereas torch accepts a slightly worse value as an improvement. A value that is not
    finite never improves.
    """

    def __init__(self, config: PlateauConfig, lr: float) -> None:
        self.config = config
        self.floor = min(config.min_lr / lr, 1.0)
        self.scale = 1.0  # factor of the schedule's value
        self.best: float | None = None
        self.bad_epochs = 0

    def update(self, value: float) -> None:
        """Records the metric of one epoch."""
        margin = 0.0 if self.best is None else abs(self.best) * self.config.threshold
        if math.isfinite(value) and improved(value, self.best, self.config.mode, margin):
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.config.patience:
            self.scale, self.bad_epochs = max(self.scale * self.config.factor, self.floor), 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "best": self.best, "bad_epochs": self.bad_epochs}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.best, self.bad_epochs = state["scale"], state["best"], state["bad_epochs"]
