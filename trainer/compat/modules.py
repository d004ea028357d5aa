"""Names the base classes of torch's layers, and the dictionaries of a module's contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer.compat.private import private

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.batchnorm import _NormBase as Norm
    from torch.nn.modules.conv import _ConvNd as ConvNd
    from torch.nn.modules.dropout import _DropoutNd as DropoutNd
else:
    ConvNd = private("torch.nn.modules.conv:_ConvNd", seen="2.13")
    BatchNorm = private("torch.nn.modules.batchnorm:_BatchNorm", seen="2.13")
    Norm = private("torch.nn.modules.batchnorm:_NormBase", seen="2.13")  # batch and instance norms
    DropoutNd = private("torch.nn.modules.dropout:_DropoutNd", seen="2.13")


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dictionary of a module's own buffers (torch 2.13), which may be written to."""
    return module._buffers


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the dictionary of a module's own parameters (torch 2.13), which may be written to."""
    return module._parameters


def modules_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the dictionary of a module's own modules (torch 2.13), which may be written to."""
    return module._modules


def unsaved_in(module: nn.Module) -> set[str]:
    """Returns the names of a module's own buffers that state_dict leaves out (torch 2.13)."""
    return module._non_persistent_buffers_set


def load_hooks_of(module: nn.Module) -> list[Any]:
    """Returns the hooks that run before a module's `load_state_dict` (torch 2.13)."""
    hooks: Any = module._load_state_dict_pre_hooks
    return [hook.hook for hook in hooks.values()]
