"""Adds LoRA by peft to a frozen model. Checkpoints hold only the adapters: the rest is read or made again."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from studies._lm.base import base_model, shapes_only, tiny_sha256
from studies._lm.config import ModelConfig, check_packages, no_such_modules

BASE = "base_sha256"  # the buffer with the digest of the tiny base


def adapted(config: ModelConfig) -> nn.Module:
    """Returns `lora` with the `state_dict` of `kept_alone`."""
    return kept_alone(lora(config), config)


def lora(config: ModelConfig) -> nn.Module:
    """Returns the frozen model with fresh adapters, a peft.PeftModel on the CPU; with B = 0 its output is unchanged.

    Raises ConfigError for missing packages, and for modules that the model does not have.
    """
    check_packages()
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or 2 * config.rank,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=list(config.modules),
        task_type="CAUSAL_LM",
    )
    base: Any = base_model(config)
    shown = shapes_only()  # fake layers cannot change their dtype, as peft does with the layers it makes
    with (
        torch.device("meta") if shown else nullcontext(),
        warnings.catch_warnings(),
    ):  # peft 0.21 uses a name of transformers 5.23 that v6 renames
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # peft corrects it
        try:
            model = get_peft_model(base, settings)
        except ValueError as error:
            layers = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
            raise no_such_modules(config.modules, layers) from error
    return _filled(model) if shown else model


def _filled(model: nn.Module) -> nn.Module:
    """Returns the model with fake adapters on the CPU in place of those on the device meta, where peft leaves them."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.device.type == "meta":
                setattr(module, name, nn.Parameter(torch.empty(p.shape)))
    return model


def kept_alone(model: nn.Module, config: ModelConfig, also: tuple[str, ...] = ()) -> nn.Module:
    """Returns the same model, saved and loaded by its trained parameters, and whatever the modules `also` have.

    Each process makes the tiny base anew, so a digest of its weights is saved with them: loading refuses, by a
    RuntimeError, adapters of another base. A directory's content belongs to the study's identity.
    """
    if not config.path:
        digest = bytes(32) if shapes_only() else tiny_sha256()
        model.register_buffer(BASE, torch.tensor([*digest], dtype=torch.uint8))
        model.register_load_state_dict_pre_hook(_same_base)
    model._register_state_dict_hook(partial(_keep, also))
    model.register_load_state_dict_post_hook(partial(_miss_kept, also))
    return model


def _same_base(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    digest = state.get(prefix + BASE)
    if digest is not None and digest.tolist() != model.get_buffer(BASE).tolist():
        raise RuntimeError(
            "its adapters belong to a tiny base model of other weights than this machine makes: load them where they "
            "were trained, or train on a directory (model.path)."
        )


def _kept(model: nn.Module, also: tuple[str, ...]) -> set[str]:
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {BASE} | trained | {name for name, _ in tensors if name.partition(".")[0] in also}


def _keep(also: tuple[str, ...], model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    kept = {prefix + name for name in _kept(model, also)}
    for key in [key for key in state if key.startswith(prefix) and key not in kept]:
        del state[key]


def _miss_kept(also: tuple[str, ...], model: nn.Module, keys: Any) -> None:
    needed = _kept(model, also)
    keys.missing_keys[:] = [key for key in keys.missing_keys if key in needed]
