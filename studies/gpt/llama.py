"""Reads and writes weights in the format of Hugging Face's Llama, without transformers.

Torch-free until weights are touched.

python -m studies.gpt.llama show DIR               # the options for `hpo run --study gpt` to start from DIR
python -m studies.gpt.llama save FILE NEW          # from a file of `hpo export --study gpt --format safetensors`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies._lm.directory import compare, fields_of, fill, options, tensors, unlike, write
from studies._lm.exported import exported, vacant
from studies.gpt.config import Config, ModelConfig
from trainer.errors import ConfigError, DataError
from trainer.model.plain_llama import PLAIN, not_plain, rope_of

if TYPE_CHECKING:
    from torch import Tensor, nn

MODULE = "studies.gpt.llama"
PARTS = {
    "norm1": "input_layernorm",
    "attend.q": "self_attn.q_proj",
    "attend.k": "self_attn.k_proj",
    "attend.v": "self_attn.v_proj",
    "attend.o": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
ENDS = {"embed.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.logits": "lm_head"}
SIZES = {  # a field of ModelConfig -> its name there
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie": "tie_word_embeddings",
}
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu"}  # their hidden_act -> ModelConfig.activation
CHECKED = (*SIZES, "rope_theta", "activation")


def their_name(name: str) -> str:
    """Returns Hugging Face's name of a parameter of `Llama`."""
    module, _, kind = name.rpartition(".")
    if module in ENDS:
        return f"{ENDS[module]}.{kind}"
    _, number, part = module.split(".", 2)
    return f"model.layers.{number}.{PARTS[part]}.{kind}"


def read_config(directory: str | Path) -> tuple[ModelConfig, int]:
    """Returns (the model's sizes, the vocabulary's) of a directory. Raises DataError if it is not a Llama like ours."""
    with fields_of(directory, "a Llama") as fields:
        sizes = {ours: fields[theirs] for ours, theirs in SIZES.items() if theirs in fields}
        sizes["rope_theta"] = rope_of(fields)["rope_theta"]
        activation = ACTIVATIONS.get(fields.get("hidden_act", "silu"))
        vocab_size, wrong = fields["vocab_size"], not_plain(fields | ({"hidden_act": "silu"} if activation else {}))
        if wrong:
            raise unlike(directory, wrong, "studies/gpt/model.py", "Llama")
        sizes.setdefault("num_kv_heads", fields["num_attention_heads"])
        sizes.setdefault("tie", False)
        sizes["activation"] = activation
        return ModelConfig.model_validate(sizes), vocab_size


def check(config: Config) -> None:
    """Raises DataError if model.weights is set and has other sizes than the configuration."""
    if not (directory := config.model.weights):
        return
    model, vocab_size = read_config(directory)
    theirs = {f"model.{name}": getattr(model, name) for name in CHECKED} | {"data.vocab_size": vocab_size}
    ours = {f"model.{name}": getattr(config.model, name) for name in CHECKED}
    ours |= {"model.mlp_size": config.model.mlp, "data.vocab_size": config.data.vocab_size}
    compare(ours, theirs, directory, MODULE)


def load(model: nn.Module, directory: str | Path) -> None:
    """Loads the weights of a directory (model.safetensors, in one file or several) into a `Llama`.

    Raises DataError if one is missing or of another shape.
    """
    stored, names = tensors(directory), {name: their_name(name) for name in model.state_dict()}
    if "lm_head.weight" not in stored:  # tied
        names["head.logits.weight"] = "model.embed_tokens.weight"
    fill(model, stored, names, directory, MODULE)


def check_savable(config: Config) -> None:
    """Raises ConfigError for what Hugging Face's Llama does not have: experts, other positions, and windows."""
    model, position = config.model, config.model.position
    if model.mixed:
        raise ConfigError(
            f"model.moe.experts is {model.moe.experts}, and Hugging Face's Llama has no experts: open the trial by "
            "hpo.load(...).load_model, or train with model.moe.experts=1."
        )
    if position.kind != "rotary" or position.window is not None:
        setting = f"kind={position.kind}" if position.kind != "rotary" else f"window={position.window}"
        raise ConfigError(
            f"model.position.{setting} is what Hugging Face's Llama does not compute: open the trial by "
            "hpo.load(...).load_model, or train with rotary positions and no window."
        )


def save(weights: Mapping[str, Tensor], config: Config, directory: str | Path, end: int | None = None) -> None:
    """Writes the state of a `Llama` so that transformers' LlamaForCausalLM.from_pretrained opens it.

    Raises ConfigError as `check_savable` does, before anything is written.
    """
    check_savable(config)
    model, rope = config.model, _rope(config)
    fields: dict[str, Any] = {theirs: getattr(model, ours) for ours, theirs in SIZES.items()}
    fields |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": config.data.vocab_size}
    fields |= {"intermediate_size": model.mlp, "max_position_embeddings": config.data.block_size, **PLAIN}
    fields |= {"rope_theta": rope["rope_theta"], "head_dim": model.hidden_size // model.num_heads}
    fields |= {"rope_parameters": rope, "hidden_act": next(k for k, v in ACTIVATIONS.items() if v == model.activation)}
    fields |= {"bos_token_id": end, "eos_token_id": end}
    theirs = {their_name(name): tensor for name, tensor in weights.items()}
    if model.tie:
        theirs.pop("lm_head.weight", None)
    write(directory, fields, theirs)


def _rope(config: Config) -> dict[str, str | float | None]:
    """Returns the positions as Hugging Face's `rope_parameters`."""
    model, position, trained = config.model, config.model.position, config.model.position.trained
    factor, width = config.data.block_size / (trained or config.data.block_size), model.hidden_size // model.num_heads
    if position.scaling == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    if position.scaling == "ntk":  # which is another base
        return {"rope_type": "default", "rope_theta": model.rope_theta * factor ** (width / (width - 2))}
    scaled: dict[str, str | float | None] = {"rope_type": position.scaling, "factor": factor}
    scaled["rope_theta"] = model.rope_theta
    return scaled | ({"original_max_position_embeddings": trained} if position.scaling == "yarn" else {})


def flags(directory: str | Path) -> list[str]:
    """Returns `-o` for every size, for a run that starts from the weights in a directory."""
    model, vocab_size = read_config(directory)
    named = model.model_dump(exclude={"weights", "moe", "position"}) | {"weights": str(directory)}
    return options({f"model.{name}": value for name, value in named.items()} | {"data.vocab_size": vocab_size})


def save_with_tokenizer(weights: Mapping[str, Tensor], config: Config, directory: Path) -> None:
    """Writes what `save` does, and the tokenizer as transformers' AutoTokenizer opens it.

    The texts are read only if the tokenizer was learnt from them.
    """
    from studies._lm.token_files import tokenizer_of
    from trainer.data.tokenizer_files import save_tokenizer

    check_savable(config)
    tokenizer = tokenizer_of(config.data)
    save(weights, config, directory, tokenizer.end)
    save_tokenizer(tokenizer, directory)


def _save_exported(file: str, directory: str) -> None:
    """Converts a file of `hpo export`, with the trial's configuration in its header."""
    settings, weights = exported(file)
    save_with_tokenizer(weights, Config.model_validate(settings), vacant(directory))
    print(f"wrote {directory}")


def main(arguments: list[str]) -> None:
    if len(arguments) == 2 and arguments[0] == "show":
        print(" ".join(flags(arguments[1])))
    elif len(arguments) == 3 and arguments[0] == "save":
        _save_exported(*arguments[1:])
    else:
        raise ConfigError("give `show DIR` or `save FILE NEW`: see studies/gpt/README.md.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
