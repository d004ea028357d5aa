"""Optimizers: `build` makes the one that `train.optim` names; the table of them is in trainer/config/optim.py."""

from trainer.optim.build import build, check, learning_rate, maker
from trainer.optim.groups import param_groups

__all__ = ["build", "check", "learning_rate", "maker", "param_groups"]
