"""Merges adapters into the weights of their base model, for exports of the whole model."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from studies._lm.config import ModelConfig
from studies._lm.text import tokenizer
from trainer.data.text import Bytes
from trainer.data.tokenizer_files import save_tokenizer
from trainer.files.paths import expanded
from trainer.task import LanguageModel

BFLOAT16 = 0.1  # share of the largest logit that computing in bfloat16 may change
# Files of a tokenizer in a directory of Hugging Face's.
FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")


def language_model(model: nn.Module, config: ModelConfig) -> LanguageModel:
    """Returns a model with adapters as a merged one in float32, with the base's tokenizer."""
    policy: Any = model
    plain = merged(policy)

    def save(directory: Path) -> None:
        plain.save_pretrained(directory)
        text = tokenizer(config)
        if isinstance(text, Bytes):
            save_tokenizer(text, directory)
            return
        for pattern in FILES:
            for file in expanded(config.path).glob(pattern):
                shutil.copyfile(file, directory / file.name)

    def logits(tokens: Tensor) -> Tensor:
        return policy(input_ids=tokens, use_cache=False).logits

    described = LanguageModel(save, logits, plain.config.vocab_size)
    return described if config.base == "fp32" else replace(described, tolerance=BFLOAT16)


@torch.no_grad()
def merged(model: Any) -> Any:
    """Returns transformers' model with the weights W + (alpha / rank) B A in float32; four-bit weights are decoded.

    A tied head, or its embedding, that has an adapter of its own is no longer tied.
    """
    from transformers import AutoModelForCausalLM

    base, shape = model.get_base_model(), copy.deepcopy(model.get_base_model().config)
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    if any(map(_is_adapted, ends)):
        shape.tie_word_embeddings = False
    plain = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    for name, tensor in plain.state_dict().items():
        path, _, kind = name.rpartition(".")
        layer: Any = base.get_submodule(path)
        weight = _decoded(getattr(layer.get_base_layer() if _is_adapted(layer) else layer, kind))
        if _is_adapted(layer) and kind == "weight":
            weight = weight + layer.get_delta_weight("default").float()
        tensor.copy_(weight)
    return plain.eval()


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _decoded(weight: Any) -> Tensor:
    """Returns a weight in float32, also one that bitsandbytes holds in four bits."""
    if (state := getattr(weight, "quant_state", None)) is None:
        return weight.detach().float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).float()
