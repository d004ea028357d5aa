"""Trials that train as lanes of one model: one forward and one backward pass for all of them."""

from trainer.fused.group import Group
from trainer.fused.lane import Lane

__all__ = ["Group", "Lane"]
