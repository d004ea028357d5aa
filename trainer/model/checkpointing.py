"""Checkpoints activations: forward passes of blocks are computed again when their gradients are needed.

It uses torch.utils.checkpoint (Chen et al. 2016, arXiv 1604.06174). The second pass draws the random numbers of the
first and does not update batch norm's statistics, so the numbers of a run are the same with and without, to the bit.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.compat.attention import KERNELS
from trainer.config import ActivationConfig
from trainer.errors import ConfigError
from trainer.model.attention import kernels
from trainer.model.running_statistics import RunningStatistics

_aten = torch.ops.aten
# Operations whose results `selective` keeps, since they are expensive relative to the result's size.
KEPT = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    *KERNELS,
]


def checkpointed(model: nn.Module, config: ActivationConfig, *, draws: bool = True) -> nn.Module:
    """Returns `model` with checkpointed forward passes of the modules that `config` names; names and parameters stay.

    Without `draws`, the second pass draws other random numbers. Raises ConfigError if there is nothing to choose.
    """
    if config.checkpoint == "none":
        return model
    for module in _chosen(model, config.modules):
        contexts = partial(_contexts, RunningStatistics(module), config.checkpoint == "selective")
        module.forward = partial(  # on this module alone, and copied with it
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts
        )
    return model


def _contexts(
    statistics: RunningStatistics, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of the first pass and of the second."""
    first, second = (
        create_selective_checkpoint_contexts([*KEPT, *kernels()]) if selective else (nullcontext(), nullcontext())
    )
    return first, _both(statistics.held(), second)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _chosen(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Returns the outermost modules that a pattern matches; without patterns, the blocks."""
    if not patterns:
        if modules := list(blocks(model)):
            return modules
        raise ConfigError(
            "train.activations.checkpoint takes the elements of a ModuleList or Sequential, and finds none in the "
            "model: name modules by train.activations.modules."
        )
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"train.activations.modules={pattern!r} matches no module; the model's last ones are "
                f"{', '.join(names[-3:])}: give a pattern that does, or leave modules out."
            )
    matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    outermost = [name for name in matched if not any(name.startswith(f"{other}.") for other in matched)]
    return [model.get_submodule(name) for name in outermost]


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the elements of the outermost lists and sequences of modules: layers of a transformer or perceptron."""
    for child in module.children():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield from blocks(child)
        elif any(p.requires_grad for p in child.parameters()):
            yield child
