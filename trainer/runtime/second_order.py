"""Makes second derivatives possible: for Sophia's curvature, and for a penalty on gradients."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.compat.compiler import in_transform
from trainer.errors import ConfigError

_inside = 0  # number of active `twice` blocks


def plainly() -> bool:
    """Returns True if kernels with one derivative and no rule for torch.vmap must be avoided now.

    That is inside `twice`, and in a transform of torch.func.
    """
    if _inside:
        return True
    return not torch.compiler.is_compiling() and in_transform()


@contextmanager
def twice(field: str, instead: str) -> Iterator[None]:
    """Makes forward and backward passes within the block differentiable again.

    Attention is not computed by its fused kernels, which have no second derivative. Raises ConfigError if another part
    of the model has none, naming the configuration's `field` that needs it, and the alternative `instead`.
    """
    global _inside
    _inside += 1
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
    finally:
        _inside -= 1
