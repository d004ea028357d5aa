"""Reads and writes weights in the format of Hugging Face's BertForMaskedLM, without transformers.

Torch-free until weights are touched.

python -m studies.bert.pretrained show DIR     # the options for `hpo run --study bert` to start from DIR
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
from studies.bert.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

MODULE, KIND = "studies.bert.pretrained", "BertForMaskedLM"
NAMES = {  # a module of `Bert` -> its name there; those of a layer without the layer's
    "embed.tokens": "bert.embeddings.word_embeddings",
    "embed.positions": "bert.embeddings.position_embeddings",
    "embed.types": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "attend.q": "attention.self.query",
    "attend.k": "attention.self.key",
    "attend.v": "attention.self.value",
    "attend.o": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm2": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
SIZES = {  # a field of ModelConfig -> its name there
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "intermediate_size",
    "positions": "max_position_embeddings",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
}
PLAIN = {  # settings that `Bert` has, and no other values of
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
COPIES = {  # a tensor that may be stored as well -> the one it equals
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# The head of sentence pairs, and what old releases stored.
UNREAD = re.compile(r"bert\.pooler\..*|cls\.seq_relationship\..*|bert\.embeddings\.position_ids")
NORM = {"gamma": "weight", "beta": "bias"}  # parameters of LayerNorm in the first BERTs


def their_name(name: str) -> str:
    """Returns Hugging Face's name of a parameter of `Bert`."""
    module, _, kind = name.rpartition(".")
    if module == "head.logits":
        return "cls.predictions.bias" if kind == "bias" else "bert.embeddings.word_embeddings.weight"
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, number, part = module.split(".", 2)
    return f"bert.encoder.layer.{number}.{NAMES[part]}.{kind}"


def read_config(directory: str | Path) -> tuple[ModelConfig, int]:
    """Returns (the model's sizes, the vocabulary's) of a directory. Raises DataError if it is not a BERT like ours."""
    with fields_of(directory, "a BERT") as fields:
        sizes = {ours: fields[theirs] for ours, theirs in SIZES.items() if theirs in fields or ours != "norm_eps"}
        vocab_size = fields["vocab_size"]
        for name, value in {"model_type": "bert", **PLAIN}.items():
            if fields.get(name, value) != value:
                raise unlike(directory, f"{name}={fields[name]!r}", "studies/bert/model.py", KIND)
        return ModelConfig.model_validate(sizes), vocab_size


def check(model: ModelConfig, vocab_size: int) -> None:
    """Raises DataError if `weights` is set and has other sizes than the configuration, the vocabulary included."""
    if model.weights:
        compare(_settings(model, vocab_size), _settings(*read_config(model.weights)), model.weights, MODULE)


def _settings(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return settings(model.sizes, vocab_size)


def flags(directory: str | Path) -> list[str]:
    """Returns `-o` for every size and the tokenizer, for a run that starts from the model in a directory."""
    model, vocab_size = read_config(directory)
    return start_options(directory, _settings(model, vocab_size) | {"model.dropout": model.dropout})


def load(network: nn.Module, model: ModelConfig, vocab_size: int) -> None:
    """Loads the weights of `model.weights` (*.safetensors, one file or several) into a `Bert`.

    Raises DataError if the directory has other sizes, or tensors that are missing, left over or of another shape.
    """
    check(model, vocab_size)
    stored = {_modern(name): tensor for name, tensor in tensors(model.weights).items() if not UNREAD.fullmatch(name)}
    names = {name: their_name(name) for name in network.state_dict()}
    refuse_surplus(stored, names.values(), COPIES, model.weights, KIND)
    fill(network, stored, names, model.weights, MODULE)


def _modern(name: str) -> str:
    """Returns the name that a tensor has today: LayerNorm's of the first BERTs are gamma and beta."""
    module, _, kind = name.rpartition(".")
    return f"{module}.{NORM[kind]}" if module.endswith("LayerNorm") and kind in NORM else name


def save(weights: Mapping[str, Tensor], model: ModelConfig, vocab_size: int, directory: str | Path, end: int) -> None:
    """Writes the state of a `Bert` so that transformers' BertForMaskedLM.from_pretrained opens it.

    `end` is the token between texts, which also pads.
    """
    sizes = model.sizes
    fields: dict[str, Any] = {theirs: sizes[ours] for ours, theirs in SIZES.items()} | PLAIN
    fields |= {"model_type": "bert", "architectures": [KIND], "vocab_size": vocab_size}
    fields |= {"attention_probs_dropout_prob": model.dropout, "pad_token_id": end, "eos_token_id": end}
    write(directory, fields, {their_name(name): tensor for name, tensor in weights.items()})


if __name__ == "__main__":
    show(sys.argv[1:], flags, "bert")
