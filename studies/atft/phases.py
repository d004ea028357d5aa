"""The weights of the loss by phase. Torch-free, so that a mistake is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.errors import ConfigError

TERMS = ("mse", "rank_ic", "cs_ic", "sharpe")
PHASES: dict[str, dict[str, float]] = {
    "1": {"mse": 1.0},
    "2": {"mse": 0.8, "rank_ic": 0.1, "cs_ic": 0.05, "sharpe": 0.05},
    "3": {"mse": 0.6, "rank_ic": 0.2, "cs_ic": 0.1, "sharpe": 0.1},
    "4": {"mse": 0.4, "rank_ic": 0.3, "cs_ic": 0.2, "sharpe": 0.1},
}


def term_weights(phase: str, scale: Mapping[str, float] | None = None) -> dict[str, float]:
    """lambda_k of a phase times the factors of `scale`; raise ConfigError where one is unknown or all come to 0."""
    if phase not in PHASES:
        raise ConfigError(f"loss.phase {phase!r} is not a phase: choose one of {', '.join(PHASES)}.")
    unknown = sorted(set(scale or {}) - set(TERMS))
    if unknown:
        raise ConfigError(f"loss.scale {unknown[0]!r} is not a term of the loss: choose among {', '.join(TERMS)}.")
    weights = {k: w * (scale or {}).get(k, 1.0) for k, w in PHASES[phase].items()}
    weights = {k: w for k, w in weights.items() if w > 0}
    if not weights:
        raise ConfigError(f"loss.scale leaves phase {phase} no term with a weight above 0: raise one of its factors.")
    return weights
