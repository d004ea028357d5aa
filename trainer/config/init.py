"""Holds `train.init`: the scheme by which weights are drawn; trainer/model/init.py applies it."""

from __future__ import annotations

from typing import Literal

from trainer.config.fields import Frozen, Positive

Scheme = Literal[
    "default",
    "xavier_uniform",
    "xavier_normal",
    "kaiming_uniform",
    "kaiming_normal",
    "orthogonal",
    "trunc_normal",
    "normal",
]


class InitConfig(Frozen):
    """Initialization of the weights of linear layers and convolutions; `default` keeps the model's own."""

    name: Scheme = "default"
    gain: Positive = 1.0  # xavier and orthogonal: times this
    std: Positive = 0.02  # normal and trunc_normal, which is truncated at two of them
    zero_last: bool = False  # the last of these layers starts at 0, its bias too, so that all outputs do
