"""Holds `train.activations`: which activations are kept for the backward pass, recomputed or offloaded."""

from __future__ import annotations

from typing import Literal

from trainer.config.fields import Frozen


class ActivationConfig(Frozen):
    """Activation checkpointing.

    `full`: a block keeps only its inputs, and its forward pass is computed again for the backward pass. `selective`:
    the results of products, convolutions and attention are kept as well.
    """

    checkpoint: Literal["none", "full", "selective"] = "none"
    # Patterns of module names, `encoder.*`; none: the elements of the outermost lists and sequences of modules.
    modules: tuple[str, ...] = ()
    # Place of the kept activations until the backward pass: on the device, in host memory, or in a file in $TMPDIR.
    offload: Literal["none", "cpu", "disk"] = "none"
