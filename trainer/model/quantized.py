"""Quantises the weights of linear layers for an export, and reads such a file back.

    from trainer.model.quantized import load_quantized
    model.load_state_dict(load_quantized("best.safetensors"))

A quantised weight W [out, in] is stored as the integers NAME and, in float32, the scales NAME.scale:

int8   an int8 q for each weight, and a scale s for each row, the largest |w| of it. It stands for q s / 127, with
       q = 127 w / s, rounded.
nf4    the numbers q of levels in four bits, and a scale s for each 64 successive weights, the largest |w| of them. It
       stands for LEVELS[q] s, the nearest one. A byte has two weights, the first in its high half, which is the layout
       of bitsandbytes. (QLoRA: Dettmers et al. 2023, arXiv 2305.14314, appendix E.)

All other tensors are stored as they are. The header has `quantize`, `shapes` (of the quantised weights, JSON) and
`same` (names of tensors that share another's memory, JSON).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.errors import ConfigError, DataError
from trainer.files.durable import replacing, sync

BLOCK = 64
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
SCALE = ".scale"


def save_quantized(model: nn.Module, kind: str, path: str | Path, about: Mapping[str, str]) -> int:
    """Writes the model's state with the weights of its linear layers quantised; returns the number of those layers.

    A weight that is an embedding as well stays as it is. Raises ConfigError for an unknown kind, for a model without
    such layers, or whose state leaves some of their weights out.
    """
    if kind not in KINDS:
        raise ConfigError(f"--quantize {kind!r} is not known: choose one of {', '.join(KINDS)}.")
    state = model.state_dict()
    names = _linear_weights(model)
    _check(model, state, names)
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        if name in names:
            tensors[name], tensors[name + SCALE] = KINDS[kind][0](tensor)
            continue
        whole = tensor.data_ptr(), tensor.shape, tensor.stride()
        if tensor.numel() and whole in first:
            same[name] = first[whole]
        else:
            first[whole] = name
            tensors[name] = tensor.detach().contiguous().clone()
    shapes = {name: list(state[name].shape) for name in names}
    header = {**about, "quantize": kind, "shapes": json.dumps(shapes), "same": json.dumps(same)}
    with replacing(Path(path)) as temporary:
        save_file(tensors, temporary, metadata=header)
        sync(temporary)
    return len(names)


def load_quantized(path: str | Path) -> dict[str, Tensor]:
    """Returns the state that `save_quantized` wrote, with decoded weights in float32, for `load_state_dict`."""
    try:
        with safe_open(str(path), framework="pt") as opened:
            about = opened.metadata() or {}
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors ({error}).") from error
    if about.get("quantize") not in KINDS:
        raise DataError(f"{path} has no quantised weights: write it by `hpo export --quantize`.")
    decode = KINDS[about["quantize"]][1]
    for name, shape in json.loads(about["shapes"]).items():
        tensors[name] = decode(tensors[name], tensors.pop(name + SCALE), torch.Size(shape))
    return tensors | {name: tensors[other] for name, other in json.loads(about["same"]).items()}


def _linear_weights(model: nn.Module) -> list[str]:
    """Returns the names of the linear layers' weights that are no other layer's, such as an embedding's."""
    others = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }
    layers = [(name, dict(m.named_parameters(recurse=False))) for name, m in model.named_modules() if _is_linear(m)]
    return [
        f"{name}.weight".removeprefix(".")
        for name, parameters in layers
        if "weight" in parameters and id(parameters["weight"]) not in others
    ]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _check(model: nn.Module, state: Mapping[str, object], names: list[str]) -> None:
    kind = type(model).__name__
    if not names:
        raise ConfigError(f"{kind} has no linear layer to quantise: leave --quantize out.")
    if left := next((name for name in names if name not in state), None):
        raise ConfigError(
            f"{kind} is stored without {left!r}, as adapters are: write the whole model by --format huggingface, and "
            "quantise it where it is opened."
        )
    if odd := next((name for name, tensor in state.items() if not isinstance(tensor, Tensor)), None):
        raise ConfigError(f"{odd!r} of {kind}, of its get_extra_state, fits into no safetensors file.")


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.detach().double()
    scale = wide.abs().amax(dim=1)
    return (wide * (127 / scale.where(scale > 0, 1.0))[:, None]).round().to(torch.int8), scale.float()


def _from_int8(numbers: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    return numbers.view(shape).float() * (scale / 127)[:, None]


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = weight.detach().double().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    numbers = torch.bucketize(blocks / scale.where(scale > 0, 1.0)[:, None], (levels[1:] + levels[:-1]) / 2)
    numbers = numbers.flatten()[: len(flat) + len(flat) % 2].to(torch.uint8)
    return numbers[::2] * 16 + numbers[1::2], scale.float()


def _from_nf4(packed: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    numbers = torch.stack([packed // 16, packed % 16], dim=1).flatten()[: shape.numel()].long()
    return (torch.tensor(LEVELS)[numbers] * scale.repeat_interleave(BLOCK)[: shape.numel()]).view(shape)


_Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
_Decode = Callable[[Tensor, Tensor, torch.Size], Tensor]
KINDS: dict[str, tuple[_Encode, _Decode]] = {"int8": (_to_int8, _from_int8), "nf4": (_to_nf4, _from_nf4)}
