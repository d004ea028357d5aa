"""Activation checkpointing: forward passes of blocks that are computed again when their gradients are needed (Chen et
al. 2016, arXiv 1604.06174), by torch.utils.checkpoint.

The second pass draws the random numbers of the first and leaves batch norm's statistics alone, so the numbers of a run
are the same with and without, to the bit.
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

from trainer.config import ActivationConfig
from trainer.errors import ConfigError
from trainer.model.running_statistics import RunningStatistics

_aten = torch.ops.aten
# What `selective` keeps: dear to compute, for the size of its result.
KEPT = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def checkpointed(model: nn.Module, config: ActivationConfig, *, draws: bool = True) -> nn.Module:
    """`model` with the forward passes of what `config` names made so; names and parameters stay as they are.

    Without `draws`, random numbers of the second pass are others. Raises ConfigError where there is nothing to choose.
    """
    if config.checkpoint == "none":
        return model
    for module in _chosen(model, config.modules):
        contexts = partial(_contexts, RunningStatistics(module), config.checkpoint == "selective")
        module.forward = partial(  # of this one module: whoever copies it copies this along
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts
        )
    return model


def _contexts(
    statistics: RunningStatistics, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What surrounds the first pass, and what the second."""
    first, second = create_selective_checkpoint_contexts(KEPT) if selective else (nullcontext(), nullcontext())
    return first, _both(statistics.held(), second)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _chosen(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The outermost modules that a pattern matches; without patterns, the blocks."""
    if not patterns:
        if found := list(blocks(model)):
            return found
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
    """The elements of the outermost lists and sequences of modules: the layers of a transformer or a perceptron."""
    for child in module.children():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield from blocks(child)
        elif any(p.requires_grad for p in child.parameters()):
            yield child
