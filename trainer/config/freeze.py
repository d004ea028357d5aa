"""Holds `train.freeze`: parameters that begin to train later than the others. Torch-free."""

from __future__ import annotations

from trainer.config.fields import Frozen, Share


class FreezeConfig(Frozen):
    """Parameters whose names match one of `patterns` (fnmatch) stay as they are for the share `until` of the run."""

    patterns: tuple[str, ...] = ()
    until: Share = 0.1
