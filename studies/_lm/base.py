"""Loads a causal language model before fine-tuning: from a directory, or a tiny Llama made by this module."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import hashlib
import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from studies._lm.config import CONTEXT, ModelConfig, depth_of
from studies._lm.words import LENGTH, statements
from trainer.data.text import Bytes
from trainer.errors import ConfigError
from trainer.files.paths import expanded
from trainer.runtime.quiet_imports import quiet_torchao

quiet_torchao()  # transformers imports it if it is installed
# Silences bitsandbytes, which peft imports, on a missing kernel that no layer of `_nf4` uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "nf4": torch.bfloat16}
STEPS, BATCH, SEED = 150, 64, 20  # for making the tiny model


def base_model(config: ModelConfig) -> nn.Module:
    """Returns the model with its weights stored as `config.base` says, none of them trained, on the CPU.

    Under FakeTensorMode it has only shapes, for which a directory's config.json is enough. Raises ConfigError if the
    directory's model cannot be read.
    """
    model = _from_directory(config) if config.path else _tiny_model(config)
    model.requires_grad_(False)
    if config.base_dropout is not None:
        _set_dropout(model, config.base_dropout)
    if config.base == "nf4":
        _quantise(model)
    return model


def _set_dropout(model: nn.Module, rate: float) -> None:
    """Sets every dropout of the model to this rate: layers, and numbers in modules and their configuration."""
    for owner in (getattr(model, "config", None), *model.modules()):
        if isinstance(owner, _DropoutNd):
            owner.p = rate
        for name, value in [*vars(owner).items()] if owner is not None else ():
            if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(owner, name, 0.0 if "layerdrop" in name else rate)


def _from_directory(config: ModelConfig) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory, dtype = expanded(config.path), DTYPES[config.base]
    try:
        shape = AutoConfig.from_pretrained(directory, local_files_only=True)
        shape.num_hidden_layers = depth_of(config) or shape.num_hidden_layers
        if shapes_only():
            return AutoModelForCausalLM.from_config(shape, dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(directory, config=shape, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path={config.path!r} cannot be read as a causal language model: {reason}") from error


def _tiny_model(config: ModelConfig) -> nn.Module:
    dtype = DTYPES[config.base]
    return _tiny_shape(dtype) if shapes_only() else copy.deepcopy(_tiny()).to(dtype)


def shapes_only() -> bool:
    """Returns True if tensors made now are fake: the model is made for an estimate of memory."""
    return isinstance(torch.empty(0), FakeTensor)


def _tiny_shape(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    tokens = {"vocab_size": Bytes.vocab_size, "bos_token_id": None, "eos_token_id": Bytes.end}
    return AutoModelForCausalLM.from_config(LlamaConfig(**tokens, **sizes, **heads), dtype=dtype)


@lru_cache(maxsize=1)
def _tiny() -> nn.Module:
    """Returns a Llama of 0.1 million parameters over bytes, trained on statements about words.

    Its weights are always the same.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the weights depend on the number
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(SEED)
            return _taught(_tiny_shape())
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def tiny_sha256() -> bytes:
    """Returns the digest of the tiny model's weights, 32 bytes: another processor or torch may round differently."""
    digest = hashlib.sha256()
    for tensor in _tiny().state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.digest()


def _taught(model: nn.Module) -> nn.Module:
    bytes_ = Bytes()
    texts = torch.tensor([[*bytes_.encode(text), bytes_.end] for text in statements(STEPS * BATCH, SEED)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS)
    for tokens in texts.split(BATCH):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, LENGTH:-1].flatten(0, 1), tokens[:, LENGTH + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


# --- NF4


def _quantise(model: nn.Module) -> None:
    """Replaces the linear layers within the model's blocks by four-bit layers of bitsandbytes, one by one."""
    head = getattr(model, "get_output_embeddings")()  # noqa: B009
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    for name, layer in linear:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _Nf4Shape(layer) if shapes_only() else _nf4(layer))


def _nf4(layer: nn.Linear) -> nn.Module:
    from bitsandbytes import nn as bnb

    quantised: Any = bnb.Params4bit
    nested: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    made = bnb.Linear4bit(
        layer.in_features,
        layer.out_features,
        False,
        compute_dtype=torch.bfloat16,
        device=torch.device("meta"),
        **nested,
    )
    # On a CPU with bfloat16 products, the first evaluation would round the scales to bfloat16 and permanently lay the
    # weight out for products without gradients: later training would differ from that of a resumed trial.
    made.support_avx512bf16_for_cpu = False
    # Moving to a device quantises, on a CPU too.
    made.weight = quantised(layer.weight.data, requires_grad=False, module=made, **nested).to("cpu")
    made.bias = layer.bias
    return made


class _Nf4Shape(nn.Linear):
    """A four-bit layer's memory and shapes, since bitsandbytes' own parameters cannot be fake tensors.

    It holds half a byte a weight, a byte for each 64 of them, a float for each 256 of these, and the whole weight
    during use.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        count = layer.weight.numel()
        self.weight = nn.Parameter(torch.empty(-(-count // 2), 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.empty(-(-count // 64), dtype=torch.uint8))
        self.register_buffer("nested", torch.empty(-(-count // (64 * 256)), dtype=torch.float32))
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        shape = self.out_features, self.in_features
        output = _Dequantised.apply(input.bfloat16(), self.weight, shape)
        return (output if self.bias is None else output + self.bias).to(input.dtype).clone()  # peft clones it too


class _Dequantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return F.linear(x, weight.new_empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ grads[0].new_empty(ctx.shape), None, None
