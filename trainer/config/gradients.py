"""Holds `train.clip` and `train.gradients`: the rules for a window's gradient, after its division by its count."""

from __future__ import annotations

from typing import Literal

from trainer.config.fields import Frozen, NonNegative, Positive, added


class ClipConfig(Frozen):
    """Clipping, in the order of the fields; each rule gets the result of the previous one. None: not applied."""

    per_parameter: Positive | None = None  # norm of each parameter's gradient
    adaptive: Positive | None = None  # norm of a unit's gradient over that of its weights; 0.01 to 0.16 in the paper
    adaptive_eps: Positive = 1e-3  # lower bound of a unit's norm, so that zeros can move
    adaptive_exclude: tuple[str, ...] = ()  # patterns of parameter names, `head.*`; the paper leaves the last layer out
    norm: Positive | None = 1.0  # of all parameters together
    value: Positive | None = None  # of each element


class GradientConfig(Frozen):
    """Other changes to the gradient, and measurements of it."""

    centralize: bool = False  # subtract the mean of each unit's gradient
    normalize: Literal["none", "global", "parameter"] = "none"  # to norm 1, of all parameters together or of each
    noise: Positive | None = None  # eta of added noise of variance eta/(1 + step)^noise_decay; 0.01 to 1 in the paper
    noise_decay: NonNegative = 0.55
    conflicts: Literal["none", "pcgrad"] = added("none")  # pcgrad: take conflicting parts off each other
    balance: Literal["none", "gradnorm"] = added("none")  # gradnorm: parts of the loss learn at one pace
    balance_alpha: NonNegative = added(1.5)  # favours parts that learn slowly; 0.12 and 1.5 in the paper
    balance_lr: Positive = added(0.025)  # of the weights
    balance_of: tuple[str, ...] = added(())  # patterns of the last shared layer's parameters; (): all
    noise_scale: bool = False  # report train/noise_scale, from the micro-batches of each window
    penalty: Positive | None = None  # weight of (|slope| - penalty_norm)^2, of the mean over samples; 10 in the paper
    penalty_norm: NonNegative = 1.0
    penalty_of: Literal["output", "loss"] = "output"  # its slope is taken by the model's inputs

    @property
    def by_parts(self) -> bool:
        """Returns True if the gradients of a loss's parts are compared."""
        return self.conflicts != "none" or self.balance != "none"
