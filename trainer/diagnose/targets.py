"""Compares a trial's reports with targets: the norm of the gradient, the utilisation of the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from trainer.finding import Finding, unmeasured

NORM = 10.0  # upper target of the gradient's norm
UTILISATION = 80.0  # lower target, in percent of the time that the GPU is busy
REPORTED = {"gradient norm": "train/grad_norm", "gpu utilisation": "train/gpu_util"}
CHECKS = tuple(REPORTED)


def findings(reported: Mapping[str, Sequence[float]]) -> list[Finding]:
    """Returns the findings on the means by epoch that a trial has reported, by metric."""
    norms, busy = (reported.get(key, ()) for key in REPORTED.values())
    return [_norm(norms), _utilisation(busy)]


def _norm(norms: Sequence[float]) -> Finding:
    if not norms:
        return unmeasured(CHECKS[0], f"no {REPORTED[CHECKS[0]]} was reported")
    last = norms[-max(len(norms) // 3, 1) :]
    mean = fmean(last)
    figure = f"the gradient's norm before clipping, mean of the last {len(last)} epochs, is {mean:.3g} (under {NORM:g})"
    if mean < NORM:
        return Finding(CHECKS[0], "healthy", figure, mean)
    advice = "take the train.optim.lr that `hpo lr-find` suggests, a longer warmup, or a train.clip.norm below it."
    return Finding(CHECKS[0], "high", figure, mean, advice)


def _utilisation(busy: Sequence[float]) -> Finding:
    if not busy:
        return unmeasured(CHECKS[1], f"no {REPORTED[CHECKS[1]]} was reported: it takes a GPU and the extra gpu")
    mean = fmean(busy)
    figure = f"the GPU was busy for {mean:.0f} % of the time (over {UTILISATION:g} %)"
    if mean > UTILISATION:
        return Finding(CHECKS[1], "healthy", figure, mean)
    advice = "raise train.batch_size or the model's size, or train.num_workers where the loader is waited for."
    return Finding(CHECKS[1], "low", figure, mean, advice)
