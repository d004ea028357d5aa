"""Races trials on their folds or seeds, by paired differences.

It is the t-race of Lopez-Ibanez et al. 2016, "The irace package" (Operations Research Perspectives 3), after Birattari
et al. 2002, "A Racing Algorithm for Configuring Metaheuristics" (GECCO). Since the folds are a fixed set, the variance
has the correction for a finite population (Cochran 1977, "Sampling Techniques", section 2.6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import ClassVar, Literal

from pydantic import Field

from hpo.search.curves import Curve
from hpo.search.pareto import Losses, breaks, front, is_nan
from hpo.search.strategies.base import BaseStrategy, History
from trainer.report import CONTINUE, Verdict


class Paired(BaseStrategy):
    """Stops a trial that is worse than the best complete one fold by fold and is unlikely to overtake it.

    parts        the number of folds or seeds that each trial trains
    p_threshold  a trial is stopped if the probability that its mean over all folds is the better one is below this
    n_startup    the number of folds that a trial trains before it may be stopped; two differences that are equal by
                 chance, as those of accuracies often are, say nothing about the deviation

    The trainer reports the loss of a trial at fold k as the mean over its first k folds, so a fold's own loss is
    k mean(k) - (k - 1) mean(k - 1). Let d be the mean and s the deviation of the k differences to the best complete
    trial. The probability that the mean difference over all K folds is not positive is the share of Student's t with
    k - 1 degrees of freedom beyond d sqrt(k) / (s sqrt(1 - k / K)). A fold that is hard for every trial does not change
    the differences. Until a trial is complete, only trials with a loss that is not finite are stopped, since their mean
    stays so.

    With several objectives a trial is stopped if one of the complete trials that no other dominates is better in each
    objective by the same test, with the threshold divided by the number of these trials. A complete trial that breaks
    constraints does not stop others.
    """

    several: ClassVar[bool] = True
    rungs: ClassVar[bool] = True
    name: Literal["paired"] = "paired"
    parts: int = Field(default=5, ge=2)
    p_threshold: float = Field(default=0.02, ge=0.0, le=1.0)
    n_startup: int = Field(default=3, ge=2)

    def wants(self, epoch: int) -> bool:
        return epoch < self.parts

    def decide(self, history: History) -> Verdict:
        count = history.epoch
        if is_nan(history.value):
            return Verdict("stop", reason=f"the objective is not finite after {count} of {self.parts} folds")
        losses = _by_fold(history.curve, count)
        rivals = _best(history.curves(("complete",)))
        if count < self.n_startup or not losses:
            return CONTINUE
        for number, curve in rivals.items():
            if (other := _by_fold(curve, count)) and (p := self._chance(losses, other)) < self.p_threshold / len(
                rivals
            ):
                return Verdict(
                    "stop", reason=f"worse than trial {number} in {count} folds of {self.parts}, p = {p:.2g}"
                )
        return CONTINUE

    def _chance(self, losses: Sequence[Losses], other: Sequence[Losses]) -> float:
        """Returns the probability that the first trial ends better, in its most favourable objective."""
        differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(losses, other, strict=True)]
        return max(chance_of_less(column, self.parts) for column in zip(*differences, strict=True))


def chance_of_less(differences: Sequence[float], count: int) -> float:
    """Returns the probability that the mean of `count` differences is below 0, given the first of them.

    It is 1 if their mean is not above 0.
    """
    mean, known = fmean(differences), len(differences)
    if mean <= 0:
        return 1.0
    error = stdev(differences) * math.sqrt((1 - known / count) / known)
    return beyond_t(mean / error, known - 1) if error else 0.0


def beyond_t(t: float, freedom: int) -> float:
    """Returns the share of Student's t above a positive `t` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    within = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return (1 - within) / 2


def _best(complete: Mapping[int, Curve]) -> dict[int, Curve]:
    """Returns the feasible complete trials that no other dominates; with one objective, the best one."""
    ends = {number: curve[-1][1] for number, curve in complete.items() if curve}
    sound = {number: _tuple(loss) for number, loss in ends.items() if not is_nan(loss) and not breaks(loss)}
    best = front(sound)[:1] if all(len(loss) == 1 for loss in sound.values()) else front(sound)
    return {number: complete[number] for number in best}


def _by_fold(curve: Curve, count: int) -> list[Losses]:
    """Returns the losses of the first folds from a curve of means; none if it lacks a fold or a finite loss."""
    means = [_tuple(loss) for _, loss in curve[:count]]
    if [epoch for epoch, _ in curve[:count]] != [*range(1, count + 1)] or any(map(is_nan, means)):
        return []
    sums = [[k * mean for mean in losses] for k, losses in enumerate(means, 1)]
    before = [[0.0] * len(sums[0]), *sums]
    return [tuple(now - then for now, then in zip(*pair, strict=True)) for pair in zip(sums, before, strict=False)]


def _tuple(loss: float | Losses) -> Losses:
    return tuple(loss) if isinstance(loss, tuple) else (float(loss),)
