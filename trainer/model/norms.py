"""Lists the modules of a model that are normalisations."""

from __future__ import annotations

from torch import nn

from trainer.compat.modules import Norm

# Modules whose own parameters are never decayed, whatever their shape.
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, Norm)
