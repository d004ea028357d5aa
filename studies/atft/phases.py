"""The weights of the loss by phase. Torch-free, so that a mistake is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config import LossWeights, Phase
from trainer.errors import ConfigError

TERMS = ("mse", "rank_ic", "cs_ic", "sharpe")
PHASES: dict[str, dict[str, float]] = {
    "1": {"mse": 1.0},
    "2": {"mse": 0.8, "rank_ic": 0.1, "cs_ic": 0.05, "sharpe": 0.05},
    "3": {"mse": 0.6, "rank_ic": 0.2, "cs_ic": 0.1, "sharpe": 0.1},
    "4": {"mse": 0.4, "rank_ic": 0.3, "cs_ic": 0.2, "sharpe": 0.1},
}


ALL = "schedule"  # all four, a quarter of the run each


def loss_weights(phase: str, scale: Mapping[str, float] | None = None) -> LossWeights:
    """lambda_k of a phase, or of ALL, times the factors of `scale`.

    Raises ConfigError where one is unknown or all come to 0.
    """
    if phase not in (*PHASES, ALL):
        raise ConfigError(f"loss.phase {phase!r} is not a phase: choose one of {', '.join((*PHASES, ALL))}.")
    scale = scale or {}
    if unknown := sorted(set(scale) - set(TERMS)):
        raise ConfigError(f"loss.scale {unknown[0]!r} is not a term of the loss: choose among {', '.join(TERMS)}.")
    rows = PHASES if phase == ALL else {phase: PHASES[phase]}
    for name, row in rows.items():
        if not any(weight * scale.get(term, 1.0) > 0 for term, weight in row.items()):
            raise ConfigError(
                f"loss.scale leaves phase {name} no term with a weight above 0: raise one of its factors."
            )
    weighed = {term for row in rows.values() for term in row}
    return LossWeights(
        phases=tuple(Phase(start=i / len(rows), weights=row) for i, row in enumerate(rows.values())),
        scale={term: factor for term, factor in scale.items() if term in weighed},
    )
