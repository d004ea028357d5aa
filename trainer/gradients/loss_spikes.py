"""Detects a loss spike, and continues training from before it.

A window whose loss lies far above the recent ones is not trained on. Weights and optimizer go back to the last
scheduled checkpoint, in case they are damaged already; step and data position go on, so the data of the jump is
skipped; and the learning rate is cut for a while. PaLM's training did the same by hand (Chowdhery et al. 2022,
arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import nn

from trainer.config import RollbackConfig
from trainer.ranks import Solo

RECENT = 16  # losses in an anomaly report
LOUDEST = 5  # modules in one
_SIGMA = 1.4826  # median absolute deviations in a standard deviation of a normal distribution


class Spikes:
    """Holds the recent losses and the rollbacks so far.

    `score` is the robust z-score (Iglewicz & Hoaglin 1993): (loss - median) / (1.4826 MAD) of the last `config.window`
    trained windows. `lr_scale` is the factor of the learning rate at a step.
    """

    def __init__(self, config: RollbackConfig) -> None:
        self.config = config
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rollbacks = 0
        self.cut_until = 0  # the first step at the full learning rate again

    def score(self, loss: float) -> float:
        """Returns how far `loss` lies above the recent ones; 0 if there are too few, inf if it is not finite."""
        if len(self.losses) < self.config.min_history:
            return 0.0
        if not math.isfinite(loss):
            return math.inf
        middle = median(self.losses)
        spread = _SIGMA * median(abs(recent - middle) for recent in self.losses)
        return (loss - middle) / max(spread, 1e-3 * abs(middle), 1e-12)

    def is_spike(self, loss: float) -> bool:
        """Returns True if `loss` is out of proportion, and above all recent ones.

        Near convergence few windows make up the loss, and such a window's score is high although nothing is wrong.
        """
        return self.config.enabled and self.score(loss) > self.config.threshold and not loss <= max(self.losses)

    def add(self, loss: float, norm: float) -> None:
        """Records a window that was trained on."""
        self.losses = [*self.losses, loss][-self.config.window :]
        self.norms = [*self.norms, norm][-self.config.window :]

    def rolled_back(self, step: int) -> None:
        """Cuts the learning rate from `step` on. Later losses are still compared with those before the jump."""
        self.rollbacks += 1
        self.cut_until = step + self.config.cooldown

    def exhausted(self, loss: float) -> str:
        """Returns a sentence if this jump, to `loss`, exceeds the allowed number; empty otherwise."""
        if (most := self.config.max_rollbacks) > self.rollbacks:
            return ""
        return (
            f"the loss jumped once more after {self.rollbacks} rollbacks: {loss:.4g}; train.rollback.max_rollbacks is "
            f"{most}: lower train.optim.lr or set train.clip.norm, or raise it."
        )

    def lr_scale(self, step: int) -> float:
        return self.config.lr_factor if step < self.cut_until else 1.0

    def report(self, loss: float, norm: float) -> dict[str, Any]:
        """Returns the numbers of an anomaly report: this window's and the usual ones."""
        return {
            "loss": loss,
            "previous_loss": self.losses[-1],
            "usual_loss": [min(self.losses), max(self.losses)],
            "score": self.score(loss),
            "grad_norm": norm,
            "usual_grad_norm": [min(self.norms), max(self.norms)],
        }

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "rollbacks": self.rollbacks,
            "cut_until": self.cut_until,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = list(state["losses"]), list(state["norms"])
        self.rollbacks, self.cut_until = state["rollbacks"], state["cut_until"]


def loudest(model: nn.Module, ranks: Solo) -> list[dict[str, Any]]:
    """Returns the modules with the largest gradients over all ranks, and their shares of the squared norm.

    If some are not finite, only those are returned.
    """
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    squares: dict[str, float] = {}
    for name, norm in zip(grads, ranks.norms([*grads.values()]), strict=True):
        module = name.rpartition(".")[0] or type(model).__name__
        squares[module] = squares.get(module, 0.0) + float(norm) ** 2
    squares = ranks.merged(squares)
    whole = math.fsum(squares.values())
    if not math.isfinite(whole):
        squares = {name: square for name, square in squares.items() if not math.isfinite(square)}
    ranked = sorted(squares, key=lambda name: squares[name], reverse=True)[:LOUDEST]
    return [{"module": name, "share": squares[name] / whole if whole else 0.0} for name in ranked]


def as_json(report: Mapping[str, Any]) -> str:
    """Returns the report as JSON, with non-finite numbers by name."""
    return json.dumps(_plain(report), indent=2) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
