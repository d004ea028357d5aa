"""Reads and writes weights in the formats of Hugging Face's BertForMaskedLM and T5ForConditionalGeneration.

Without transformers; torch-free until weights are touched.

python -m studies.denoise.pretrained show DIR     # the options for `hpo run --study denoise` to start from DIR
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies._lm.directory import compare, fields_of, fill, options, tensors, write
from studies.denoise.config import ModelConfig
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

MODULE = "studies.denoise.pretrained"
BERT = {  # a module of Bert -> its name there; those of a layer without the layer's
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
T5 = {  # a module of a T5's layer -> its name there; {} is the number of the last sublayer
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
    "bert": {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_size": "intermediate_size",
        "positions": "max_position_embeddings",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
    },
    "t5": {
        "hidden_size": "d_model",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "head_size": "d_kv",
        "mlp_size": "d_ff",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "dropout_rate",
    },
}
PLAIN = {  # settings that the networks have, and no other values of
    "bert": {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "t5": {
        "is_encoder_decoder": True,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
}
ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu"}  # their feed_forward_proj -> ModelConfig.activation
COPIES = {  # a tensor that may be stored as well -> the one it equals
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}
UNREAD = re.compile(  # the sentence head of BERT's pre-training, and what old releases stored and none reads
    r"bert\.pooler\..*|cls\.seq_relationship\..*|bert\.embeddings\.position_ids"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
NORM = {"gamma": "weight", "beta": "bias"}  # parameters of LayerNorm in the first BERTs


def their_name(name: str, model: ModelConfig) -> str:
    """Returns Hugging Face's name of a parameter of `Bert` or `T5`."""
    module, _, kind = name.rpartition(".")
    return _bert_name(module, kind) if model.kind == "bert" else _t5_name(module, kind, model)


def _bert_name(module: str, kind: str) -> str:
    if module == "head.logits":
        return "cls.predictions.bias" if kind == "bias" else "bert.embeddings.word_embeddings.weight"
    if module in BERT:
        return f"{BERT[module]}.{kind}"
    _, number, part = module.split(".", 2)
    return f"bert.encoder.layer.{number}.{BERT[part]}.{kind}"


def _t5_name(module: str, kind: str, model: ModelConfig) -> str:
    if module in ("embed", "head"):
        return "lm_head.weight" if module == "head" and not model.tie else "shared.weight"
    stack, _, rest = module.partition(".")
    if rest == "bias":
        return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.{kind}"
    if rest == "norm":
        return f"{stack}.final_layer_norm.{kind}"
    _, number, part = rest.split(".", 2)
    theirs = T5[part].format(2 if stack == "decoder" else 1)
    theirs = theirs.replace("wi_1", "wi") if model.activation == "relu" else theirs
    return f"{stack}.block.{number}.{theirs}.{kind}"


def read_config(directory: str | Path) -> tuple[ModelConfig, int]:
    """Returns (the model's sizes, the vocabulary's) of a directory.

    Raises DataError if it is neither a BERT nor a T5 like ours.
    """
    with fields_of(directory, "a BERT or a T5") as fields:
        kind = fields["model_type"]
        if kind not in SIZES:
            raise _unlike(directory, f"model_type={kind!r}")
        sizes = {ours: fields[theirs] for ours, theirs in SIZES[kind].items() if theirs in fields} | {"kind": kind}
        sizes |= _t5_sizes(fields, directory) if kind == "t5" else {}
        vocab_size, plain = fields["vocab_size"], PLAIN[kind]
    if wrong := [f"{name}={fields[name]!r}" for name, value in plain.items() if fields.get(name, value) != value]:
        raise _unlike(directory, wrong[0])
    return ModelConfig.model_validate(sizes), vocab_size


def _t5_sizes(fields: Mapping[str, Any], directory: str | Path) -> dict[str, Any]:
    """Returns `activation` and `tie`.

    Newer releases write tie_word_embeddings=true for any T5, and that it is untied as scale_decoder_outputs=false.
    """
    feed, layers = fields.get("feed_forward_proj", "relu"), fields["num_layers"]
    if feed not in ACTIVATIONS:
        raise _unlike(directory, f"feed_forward_proj={feed!r}")
    if (others := fields.get("num_decoder_layers") or layers) != layers:
        raise _unlike(directory, f"num_layers={layers} and num_decoder_layers={others}")
    tied = fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True))
    return {"activation": ACTIVATIONS[feed], "tie": tied}


def _unlike(directory: str | Path, wrong: str) -> DataError:
    file = Path(directory) / "config.json"
    return DataError(
        f"{file} has {wrong}, which studies/denoise/bert.py and t5.py do not compute: give a plain BertForMaskedLM or "
        "T5ForConditionalGeneration."
    )


def check(model: ModelConfig, vocab_size: int) -> None:
    """Raises DataError if `weights` is set and has other sizes than the configuration, `data.vocab_size` included."""
    if not (directory := model.weights):
        return
    theirs, their_size = read_config(directory)
    compare(_sizes(model, vocab_size), _sizes(theirs, their_size), directory, MODULE)


def _sizes(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns what weights must agree in, by its path in the configuration."""
    sizes = {"kind": model.kind, **model.sizes} | ({"head_size": model.width} if model.kind == "t5" else {})
    del sizes["dropout"]
    return {f"model.{name}": value for name, value in sizes.items()} | {"data.vocab_size": vocab_size}


def flags(directory: str | Path) -> list[str]:
    """Returns `-o` for every size, for a run that starts from the weights in a directory."""
    model, vocab_size = read_config(directory)
    sizes = _sizes(model, vocab_size)
    return options(sizes | {"model.dropout": model.dropout, "model.weights": str(directory)})


def load(network: nn.Module, model: ModelConfig, vocab_size: int) -> None:
    """Loads the weights of `model.weights` (*.safetensors, one file or several) into a `Bert` or `T5`.

    Raises DataError if the directory has other sizes, or tensors that are missing, left over or of another shape.
    """
    check(model, vocab_size)
    stored = {_modern(name): tensor for name, tensor in tensors(model.weights).items()}
    names = {name: their_name(name, model) for name in network.state_dict()}
    if "lm_head.weight" not in stored and model.kind == "t5":  # equal to the embedding, so that it is stored once
        names["head.weight"] = "shared.weight"
    _refuse_surplus(stored, names.values(), model.weights)
    fill(network, stored, names, model.weights, MODULE)


def _modern(name: str) -> str:
    """Returns the name that a tensor has today: LayerNorm's of the first BERTs are gamma and beta."""
    module, _, kind = name.rpartition(".")
    return f"{module}.{NORM[kind]}" if module.endswith("LayerNorm") and kind in NORM else name


def _refuse_surplus(stored: Mapping[str, Tensor], names: Iterable[str], directory: str) -> None:
    """Raises DataError for a tensor that the model has none for, unless it repeats another or nothing reads it."""
    for name in sorted(stored.keys() - {*names}):
        if UNREAD.fullmatch(name):
            continue
        if (original := COPIES.get(name, "")) not in stored:
            raise DataError(
                f"model.weights: {directory} has {name}, and the model has no such tensor: give a directory that "
                "BertForMaskedLM or T5ForConditionalGeneration has saved."
            )
        if not stored[name].equal(stored[original]):
            raise DataError(
                f"model.weights: {directory} has other values for {name} than for {original}, and in the model they "
                "are a single tensor: give a directory whose config.json and tensors agree on whether they are tied."
            )


def save(
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    vocab_size: int,
    directory: str | Path,
    *,
    pad: int = 0,
    end: int | None = None,
) -> None:
    """Writes the state of a `Bert` or `T5` so that from_pretrained of Hugging Face's class opens it.

    `pad` and `end` are numbers of tokens; a T5's decoder starts with `pad`.
    """
    sizes = model.model_dump() | {"mlp_size": model.mlp, "norm_eps": model.eps, "head_size": model.width}
    fields = {theirs: sizes[ours] for ours, theirs in SIZES[model.kind].items()} | PLAIN[model.kind]
    fields |= {"model_type": model.kind, "vocab_size": vocab_size, "pad_token_id": pad, "eos_token_id": end}
    if model.kind == "bert":
        fields |= {"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": model.dropout}
    else:
        feed = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
        fields |= {"architectures": ["T5ForConditionalGeneration"], "feed_forward_proj": feed}
        fields |= {"tie_word_embeddings": model.tie, "decoder_start_token_id": pad}
    write(directory, fields, {their_name(name, model): tensor for name, tensor in weights.items()})


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0] != "show":
        raise ConfigError("give `show DIR`: see studies/denoise/README.md.")
    print(" ".join(flags(arguments[1])))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
