"""Writes a tokenizer as the files that transformers' AutoTokenizer opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.text import BPE, Bytes, Tokenizer
from trainer.data.vocabularies import letters


def save_tokenizer(
    tokenizer: Tokenizer, directory: Path, *, added: Sequence[str] = (), roles: Mapping[str, str] | None = None
) -> None:
    """Writes tokenizer.json and tokenizer_config.json into a directory; nothing for a tokenizer of another kind.

    `added` are special tokens whose ids follow those of the tokenizer. `roles` are more fields of
    tokenizer_config.json, such as `mask_token`.
    """
    if isinstance(tokenizer, BPE):
        content, end = tokenizer.to_json(), tokenizer.end_token
    elif isinstance(tokenizer, Bytes):
        content, end = _of_bytes(BPE.END), BPE.END
    else:
        return
    content["added_tokens"] += [_special(tokenizer.vocab_size + number, name) for number, name in enumerate(added)]
    text = json.dumps(content, ensure_ascii=False, indent=1)
    (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, **(roles or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _special(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return {"id": number, "content": content, **flags, "special": True}


def _of_bytes(end: str) -> dict[str, Any]:
    """Returns the JSON of `tokenizers` for `Bytes`: byte pairs of which none is joined."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: byte for byte, letter in enumerate(letters())} | {end: Bytes.end}
    absent = dict.fromkeys(["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"])
    model = {"type": "BPE", **absent, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        **dict.fromkeys(["truncation", "padding", "normalizer", "post_processor"]),
        "added_tokens": [_special(Bytes.end, end)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model | {"vocab": vocabulary, "merges": []},
    }
