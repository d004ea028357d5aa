"""Initialises weights by a scheme's name.

    xavier_uniform, xavier_normal     variance 2 gain^2/(fan_in + fan_out)    Glorot & Bengio 2010, eq. 16
    kaiming_uniform, kaiming_normal   variance 2/fan_in, for ReLU             He et al. 2015, arXiv 1502.01852, eq. 10
    orthogonal                        (semi-)orthogonal rows or columns       Saxe et al. 2014, arXiv 1312.6120
    normal, trunc_normal              variance std^2, the second cut at 2 std, which leaves 0.774 of it

They apply to the trained weights of linear layers and convolutions. Biases, norms, embeddings, weights shared with
another kind of layer (tied to an embedding, say) and a module's own parameters stay as the model made them. Each
weight has its own random numbers, a function of the seed and its name.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from trainer.config import InitConfig
from trainer.runtime.seeding import derive

_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@torch.no_grad()
def initialise(model: nn.Module, config: InitConfig, seed: int) -> nn.Module:
    """Draws the weights of `model`, on the CPU, as `config` says, in place; returns the model."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)]
    if config.name != "default":
        shared = {p for m in model.modules() if not isinstance(m, _LAYERS) for p in m.parameters(recurse=False)}
        for name, layer in layers:
            if layer.weight.requires_grad and layer.weight not in shared:
                generator = torch.Generator().manual_seed(derive(seed, f"weights/{name}"))
                _scheme(config)(layer.weight, generator=generator)
    if config.zero_last and layers:
        for p in layers[-1][1].parameters(recurse=False):
            p.zero_()
    return model


def _scheme(config: InitConfig):
    if config.name in ("xavier_uniform", "xavier_normal", "orthogonal"):
        return partial(getattr(nn.init, f"{config.name}_"), gain=config.gain)
    if config.name in ("kaiming_uniform", "kaiming_normal"):
        return partial(getattr(nn.init, f"{config.name}_"), nonlinearity="relu")
    if config.name == "trunc_normal":
        return partial(nn.init.trunc_normal_, std=config.std, a=-2 * config.std, b=2 * config.std)
    return partial(nn.init.normal_, std=config.std)
