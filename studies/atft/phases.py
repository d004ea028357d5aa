"""Defines the four phases of training: their lengths, learning rates, loss weights and active parts of the model.

Torch-free, so that a mistake is refused before anything is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from trainer.config import Frozen, LossWeights, NonNegative, Phase
from trainer.errors import ConfigError

TERMS = ("mse", "rank_ic", "cs_ic", "sharpe")
ALL = "schedule"  # all four, one after another


class TermWeights(Frozen):
    """lambda_k: the weight of each term of the loss; `mse` is that of the point loss, whichever is chosen."""

    mse: NonNegative = 0.0
    rank_ic: NonNegative = 0.0
    cs_ic: NonNegative = 0.0
    sharpe: NonNegative = 0.0


class PhaseConfig(Frozen):
    """Settings of one phase.

    `epochs` is its length in proportion to the others': they share train.num_epochs, and 0 leaves it out. `lr` is a
    factor on the schedule's learning rate; `graph` and `fan` say whether those parts of the model take part.
    """

    epochs: NonNegative = 1.0
    lr: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    graph: bool = True
    fan: bool = True
    weights: TermWeights


PHASES: dict[str, PhaseConfig] = {
    "1": PhaseConfig(graph=False, fan=False, weights=TermWeights(mse=1.0)),
    "2": PhaseConfig(fan=False, weights=TermWeights(mse=0.8, rank_ic=0.1, cs_ic=0.05, sharpe=0.005)),
    "3": PhaseConfig(weights=TermWeights(mse=0.6, rank_ic=0.2, cs_ic=0.1, sharpe=0.01)),
    "4": PhaseConfig(lr=0.3, weights=TermWeights(mse=0.4, rank_ic=0.3, cs_ic=0.2, sharpe=0.01)),
}


@dataclass(frozen=True)
class Plan:
    """The phases of a run: (the share of it at which each starts, the phase), and the loss weights over the run."""

    phases: tuple[tuple[float, PhaseConfig], ...]
    weights: LossWeights

    def at(self, progress: float) -> PhaseConfig:
        """Returns the phase once the share `progress` of the run is done."""
        return [phase for start, phase in self.phases if start <= progress][-1]


def behind(progress: float) -> float:
    """Returns a share just before `progress`, since training so far is judged by its own phase."""
    return max(math.nextafter(progress, 0.0), 0.0)


def plan(phase: str, scale: Mapping[str, float] | None = None, phases: Mapping[str, PhaseConfig] = PHASES) -> Plan:
    """Returns the run of one phase, named as in `phases`, or of ALL; its weights times the factors of `scale`.

    Raises ConfigError if `phase` or a term is unknown, no phase has a length, or all weights of one are 0.
    """
    if phase not in (*phases, ALL):
        raise ConfigError(f"loss.phase {phase!r} is not a phase: choose one of {', '.join((*phases, ALL))}.")
    scale = scale or {}
    if unknown := sorted(set(scale) - set(TERMS)):
        raise ConfigError(f"loss.scale.{unknown[0]} is not a term of the loss: choose among {', '.join(TERMS)}.")
    rows = {n: p for n, p in sorted(phases.items()) if p.epochs > 0} if phase == ALL else {phase: phases[phase]}
    if not rows:
        raise ConfigError("phases.*.epochs are all 0: give at least one phase a length.")
    for name, row in rows.items():
        if not any(weight * scale.get(term, 1.0) > 0 for term, weight in row.weights):
            raise ConfigError(
                f"phase {name} is left no term with a weight above 0: raise one of phases.{name}.weights or loss.scale."
            )
    ends = list(accumulate(row.epochs for row in rows.values()))
    starts = [0.0, *(end / ends[-1] for end in ends[:-1])]
    weighed = [{term: weight for term, weight in row.weights if weight} for row in rows.values()]
    return Plan(
        phases=tuple(zip(starts, rows.values(), strict=True)),
        weights=LossWeights(
            phases=tuple(Phase(start=start, weights=row) for start, row in zip(starts, weighed, strict=True)),
            scale={term: factor for term, factor in scale.items() if any(term in row for row in weighed)},
        ),
    )
