"""Converts a Llama of Hugging Face's to a GGUF file, in float32.

Rotary positions turn coordinate i of a head with i + width/2 in Hugging Face's layout, and 2i with 2i + 1 in GGUF's, so
the rows of q and k are ordered anew within each head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.vocabularies import letters
from trainer.errors import ConfigError
from trainer.model.plain_llama import head_width, not_plain, rope_of

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# A pre-tokenizer of `tokenizers` that GGUF has a name for: GPT-2's.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
# GGUF needs at least one pair to join. A tokenizer of bytes joins those of which UTF-8 has neither, to its end.
NEVER = 0xFE, 0xFF


def check_plain(fields: Mapping[str, Any]) -> None:
    """Raises ConfigError, which names the setting, unless a config.json is that of a Llama as GGUF has it."""
    if wrong := not_plain(fields):
        raise ConfigError(
            f"--format gguf: the model's config.json has {wrong}, and only a plain Llama is written as GGUF: choose "
            "huggingface, from which llama.cpp's own converter reads more models."
        )


def write(directory: Path, path: Path, name: str, about: Mapping[str, str]) -> str:
    """Writes the model of a directory to `path`; returns a sentence if its tokenizer has no form in GGUF, else "".

    `about` is kept in keys `hpo.*`. Raises ConfigError as `check_plain` does.
    """
    from gguf import GGUFWriter
    from safetensors.torch import load_file

    fields: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    check_plain(fields)
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    _add_sizes(writer, fields)
    note = _add_tokenizer(writer, fields, directory)
    for key, text in about.items():
        writer.add_string(f"hpo.{key}", text)
    for file in sorted(directory.glob("*.safetensors")):
        for theirs, tensor in load_file(file).items():
            writer.add_tensor(gguf_name(theirs), permuted(theirs, tensor.float(), fields).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return note


def gguf_name(name: str) -> str:
    """Returns GGUF's name of a parameter of Hugging Face's Llama."""
    module, _, kind = name.rpartition(".")
    if module in ENDS:
        return f"{ENDS[module]}.{kind}"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{PARTS[part]}.{kind}"


def permuted(name: str, weight: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """Returns a weight with the rows of q and k in GGUF's order: halves [heads, 2, width/2] become pairs."""
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}
    number = heads.get(name.split(".")[-2])
    if number is None:
        return weight
    return weight.unflatten(0, (number, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_sizes(writer: GGUFWriter, fields: Mapping[str, Any]) -> None:
    writer.add_file_type(0)  # all in float32
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(rope_of(fields)["rope_theta"])
    writer.add_rope_dimension_count(head_width(fields))


def _add_tokenizer(writer: GGUFWriter, fields: Mapping[str, Any], directory: Path) -> str:
    """Adds a byte-level vocabulary with its pairs; returns a sentence if the tokenizer is of another kind."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _without(writer, "it is not in a tokenizer.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    model, pre = content["model"], content.get("pre_tokenizer") or {}
    splits = pre.get("use_regex", True) or not model.get("merges")
    if model.get("type") != "BPE" or content.get("normalizer") or not (pre | BYTE_LEVEL == pre and splits):
        return _without(writer, "it is not byte-level pairs on GPT-2's words")
    tokens, kinds = _vocabulary(content, fields["vocab_size"])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    end, begin = fields.get("eos_token_id"), fields.get("bos_token_id")
    if not merges and isinstance(end, int):
        first, second = (letters()[byte] for byte in NEVER)
        merges, tokens[end] = [f"{first} {second}"], first + second
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    if isinstance(end, int):
        writer.add_eos_token_id(end)
    if isinstance(begin, int):
        writer.add_bos_token_id(begin)
    writer.add_add_bos_token(isinstance(begin, int))
    return ""


def _without(writer: GGUFWriter, why: str) -> str:
    writer.add_tokenizer_model("none")
    return f"The tokenizer has no form in GGUF ({why}): the file has none, and takes and gives token numbers."


def _vocabulary(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Returns the tokens by number and their kinds, with unused ones in place of numbers without a token."""
    from gguf import TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [int(TokenType.UNUSED)] * size
    for token, number in content["model"]["vocab"].items():
        tokens[number], kinds[number] = token, int(TokenType.NORMAL)
    for added in content.get("added_tokens", []):
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(kind)
    return tokens, kinds
