"""`train.optim`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from trainer.config.fields import Beta, Frozen, NonNegative, Positive


class OptimConfig(Frozen):
    """The optimizer. Norms and biases (parameters of fewer than two dimensions) are never decayed."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive | None = None  # None: adamw 1e-3, sgd 0.1
    weight_decay: NonNegative | None = None  # None: adamw 0.01, sgd 1e-4
    momentum: Beta = 0.9  # sgd
    nesterov: bool = False  # sgd
    betas: tuple[Beta, Beta] | None = None  # adamw; None: (0.9, 0.999)
    eps: Positive = 1e-8  # adamw

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true but momentum is 0: set momentum above 0, or nesterov to false.")
        return self
