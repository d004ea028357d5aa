"""Makes second derivatives possible: for Sophia's curvature, and for a penalty on gradients."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.errors import ConfigError


@contextmanager
def twice(field: str, instead: str) -> Iterator[None]:
    """Forward and backward passes inside can be differentiated again: attention is not computed by its fused kernels,
    which have no second derivative. Raises ConfigError where another part of the model has none, naming the
    configuration's `field` that needs it, and what to do `instead`."""
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:
        if "derivative" not in str(error):
            raise
        raise ConfigError(
            f"train.{field} needs second derivatives, and a part of the model has none "
            f"({str(error).splitlines()[0]}): {instead}."
        ) from error
