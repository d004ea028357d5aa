"""Notices a loss spike, and continues training from before it.

A window whose loss lies far above the recent ones is not trained on. Weights and optimizer go back to the last
scheduled checkpoint, in case the damage is in them already; step and data position go on, so the data that came with
the jump is passed over; and the learning rate is cut for a while. PaLM's training did as much by hand (Chowdhery et al.
2022, arXiv 2204.02311, section 5.1).
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
    """The recent losses, and what has been rolled back.

    `score` is the robust z-score (Iglewicz & Hoaglin 1993): (loss - median) / (1.4826 MAD) of the last
    `config.window` trained windows. `lr_scale` is what the learning rate is multiplied by at a step.
    """

    def __init__(self, config: RollbackConfig) -> None:
        self.config = config
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rollbacks = 0
        self.cut_until = 0  # the first step at the full learning rate again

    def score(self, loss: float) -> float:
        """How far `loss` lies above the recent ones; 0 while there are too few of them, inf if it is not finite."""
        if len(self.losses) < self.config.min_history:
            return 0.0
        if not math.isfinite(loss):
            return math.inf
        middle = median(self.losses)
        spread = _SIGMA * median(abs(one - middle) for one in self.losses)
        return (loss - middle) / max(spread, 1e-3 * abs(middle), 1e-12)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is out of proportion, and above all recent ones: near convergence few windows make up the
        loss, and the score of such a window is high without anything being wrong."""
        return self.config.enabled and self.score(loss) > self.config.threshold and not loss <= max(self.losses)

    def add(self, loss: float, norm: float) -> None:
        """Take in a window that was trained on."""
        self.losses = [*self.losses, loss][-self.config.window :]
        self.norms = [*self.norms, norm][-self.config.window :]

    def rolled_back(self, step: int) -> None:
        """Cut the learning rate from `step` on. What was seen before the jump stays the measure of what comes."""
        self.rollbacks += 1
        self.cut_until = step + self.config.cooldown

    def exhausted(self, loss: float) -> str:
        """That this jump, to `loss`, is one too many, in words; empty where it is not."""
        if (most := self.config.max_rollbacks) > self.rollbacks:
            return ""
        return (
            f"the loss jumped once more after {self.rollbacks} rollbacks: {loss:.4g}; train.rollback.max_rollbacks is "
            f"{most}: lower train.optim.lr or set train.clip.norm, or raise it."
        )

    def lr_scale(self, step: int) -> float:
        return self.config.lr_factor if step < self.cut_until else 1.0

    def report(self, loss: float, norm: float) -> dict[str, Any]:
        """The numbers of an anomaly report: this window's beside the usual ones."""
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
    """The modules with the largest gradients, and their shares of the squared norm; those that are not finite alone
    where there are some. Over all ranks."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found: dict[str, float] = {}
    for name, norm in zip(grads, ranks.norms([*grads.values()]), strict=True):
        module = name.rpartition(".")[0] or type(model).__name__
        found[module] = found.get(module, 0.0) + float(norm) ** 2
    found = ranks.merged(found)
    whole = math.fsum(found.values())
    if not math.isfinite(whole):
        found = {name: square for name, square in found.items() if not math.isfinite(square)}
    ranked = sorted(found, key=lambda name: found[name], reverse=True)[:LOUDEST]
    return [{"module": name, "share": found[name] / whole if whole else 0.0} for name in ranked]


def as_json(report: Mapping[str, Any]) -> str:
    """What is not finite stands in it by its name."""
    return json.dumps(_plain(report), indent=2) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
