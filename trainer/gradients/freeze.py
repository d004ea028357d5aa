"""Keeps parameters as they are for the first part of a run, by `train.freeze`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainer.config.freeze import FreezeConfig
from trainer.errors import ConfigError


class Freeze:
    """Drops the gradients of frozen parameters, so that no optimizer steps them and no norm counts them.

    They have no optimizer state until they train: their moments begin there.
    """

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], config: FreezeConfig, total: int) -> None:
        names = {p: name for name, p in model.named_parameters()}
        for pattern in config.patterns:
            if not any(fnmatchcase(names[p], pattern) for p in params):
                some = ", ".join(names[p] for p in params[:5])
                raise ConfigError(
                    f"train.freeze.patterns: no parameter's name matches {pattern!r}; this model's names are such as "
                    f"{some}: give a pattern that matches."
                )
        self.end = config.until * total  # the first step at which they train
        self.params = [p for p in params if any(fnmatchcase(names[p], pattern) for pattern in config.patterns)]
        if len(self.params) == len(params):
            raise ConfigError(
                f"train.freeze.patterns {list(config.patterns)} match every parameter, and none is left to train: "
                "leave some of them out."
            )

    def apply(self, step: int) -> None:
        """Drops the gradients of a step's backward passes."""
        if step < self.end:
            for p in self.params:
                p.grad = None
