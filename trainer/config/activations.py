"""`train.activations`: which activations are kept for the backward pass, recomputed or offloaded."""

from __future__ import annotations

from typing import Literal

from trainer.config.fields import Frozen


class ActivationConfig(Frozen):
    """Activation checkpointing. `full`: a block keeps its inputs alone, and its forward pass is computed once more for
    the backward pass. `selective`: the results of products, convolutions and attention are kept as well."""

    checkpoint: Literal["none", "full", "selective"] = "none"
    # Patterns of module names, `encoder.*`; none: the elements of the outermost lists and sequences of modules.
    modules: tuple[str, ...] = ()
    # Where what is kept waits for the backward pass: on the device, in the host's memory, or in a file of $TMPDIR.
    offload: Literal["none", "cpu", "disk"] = "none"
