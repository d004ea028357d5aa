"""Reads and writes weights in the format of Hugging Face's T5ForConditionalGeneration, without transformers.

Torch-free until weights are touched.

python -m studies.t5.pretrained show DIR     # the options for `hpo run --study t5` to start from DIR
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies._lm.directory import (
    compare,
    fields_of,
    fill,
    refuse_surplus,
    settings,
    show,
    start_options,
    tensors,
    unlike,
    write,
)
from studies.t5.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

MODULE, KIND = "studies.t5.pretrained", "T5ForConditionalGeneration"
NAMES = {  # a module of a layer -> its name there; {} is the number of the last sublayer
    "norm1": "layer.0.layer_norm",
    **{f"attend.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "norm_cross": "layer.1.layer_norm",
    **{f"cross.{name}": f"layer.1.EncDecAttention.{name}" for name in "qkvo"},
    "norm2": "layer.{}.layer_norm",
    "mlp.gate": "layer.{}.DenseReluDense.wi_0",
    "mlp.up": "layer.{}.DenseReluDense.wi_1",
    "mlp.down": "layer.{}.DenseReluDense.wo",
}
SIZES = {  # a field of ModelConfig -> its name there
    "hidden_size": "d_model",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "head_size": "d_kv",
    "mlp_size": "d_ff",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "dropout_rate",
}
PLAIN = {  # settings that `T5` has, and no other values of
    "is_encoder_decoder": True,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
}
ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu"}  # their feed_forward_proj -> ModelConfig.activation
# Tensors that may be stored as well, and equal shared.weight.
COPIES = dict.fromkeys(
    ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"], "shared.weight"
)
# Stored by old releases.
UNREAD = re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")


def their_name(name: str, model: ModelConfig) -> str:
    """Returns Hugging Face's name of a parameter of `T5`."""
    module, _, kind = name.rpartition(".")
    if module in ("embed", "head"):
        return "lm_head.weight" if module == "head" and not model.tie else "shared.weight"
    stack, _, rest = module.partition(".")
    if rest == "bias":
        return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.{kind}"
    if rest == "norm":
        return f"{stack}.final_layer_norm.{kind}"
    _, number, part = rest.split(".", 2)
    theirs = NAMES[part].format(2 if stack == "decoder" else 1)
    theirs = theirs.replace("wi_1", "wi") if model.activation == "relu" else theirs
    return f"{stack}.block.{number}.{theirs}.{kind}"


def read_config(directory: str | Path) -> tuple[ModelConfig, int]:
    """Returns (the model's sizes, the vocabulary's) of a directory. Raises DataError if it is not a T5 like ours."""
    with fields_of(directory, "a T5") as fields:
        if fields["model_type"] != "t5":
            raise unlike(directory, f"model_type={fields['model_type']!r}", "studies/t5/model.py", KIND)
        sizes = {ours: fields[theirs] for ours, theirs in SIZES.items() if theirs in fields or ours != "norm_eps"}
        feed, layers, vocab_size = fields.get("feed_forward_proj", "relu"), fields["num_layers"], fields["vocab_size"]
        wrong = [f"{name}={fields[name]!r}" for name, value in PLAIN.items() if fields.get(name, value) != value]
        if feed not in ACTIVATIONS:
            wrong.append(f"feed_forward_proj={feed!r}")
        if (others := fields.get("num_decoder_layers") or layers) != layers:
            wrong.append(f"num_layers={layers} and num_decoder_layers={others}")
        if wrong:
            raise unlike(directory, wrong[0], "studies/t5/model.py", KIND)
        # Newer releases write tie_word_embeddings=true for any T5, and scale_decoder_outputs=false for an untied one.
        tied = fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True))
        return ModelConfig.model_validate(sizes | {"activation": ACTIVATIONS[feed], "tie": tied}), vocab_size


def check(model: ModelConfig, vocab_size: int) -> None:
    """Raises DataError if `weights` is set and has other sizes than the configuration, the vocabulary included."""
    if model.weights:
        compare(_settings(model, vocab_size), _settings(*read_config(model.weights)), model.weights, MODULE)


def _settings(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return settings(model.sizes | {"head_size": model.width}, vocab_size)


def flags(directory: str | Path) -> list[str]:
    """Returns `-o` for every size and the tokenizer, for a run that starts from the model in a directory."""
    model, vocab_size = read_config(directory)
    return start_options(directory, _settings(model, vocab_size) | {"model.dropout": model.dropout})


def load(network: nn.Module, model: ModelConfig, vocab_size: int) -> None:
    """Loads the weights of `model.weights` (*.safetensors, one file or several) into a `T5`.

    Raises DataError if the directory has other sizes, or tensors that are missing, left over or of another shape.
    """
    check(model, vocab_size)
    stored = {name: tensor for name, tensor in tensors(model.weights).items() if not UNREAD.fullmatch(name)}
    names = {name: their_name(name, model) for name in network.state_dict()}
    if "lm_head.weight" not in stored:  # equal to the embedding, so that it is stored once
        names["head.weight"] = "shared.weight"
    refuse_surplus(stored, names.values(), COPIES, model.weights, KIND)
    fill(network, stored, names, model.weights, MODULE)


def save(
    weights: Mapping[str, Tensor], model: ModelConfig, vocab_size: int, directory: str | Path, start: int, end: int
) -> None:
    """Writes the state of a `T5` so that transformers' T5ForConditionalGeneration.from_pretrained opens it.

    `start` is the token that the decoder starts with, which also pads.
    """
    sizes = model.sizes | {"head_size": model.width}
    feed = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    fields: dict[str, Any] = {theirs: sizes[ours] for ours, theirs in SIZES.items()} | PLAIN
    fields |= {"model_type": "t5", "architectures": [KIND], "vocab_size": vocab_size, "feed_forward_proj": feed}
    fields |= {"pad_token_id": start, "eos_token_id": end, "decoder_start_token_id": start}
    fields |= {"tie_word_embeddings": model.tie}
    write(directory, fields, {their_name(name, model): tensor for name, tensor in weights.items()})


if __name__ == "__main__":
    show(sys.argv[1:], flags, "t5")
