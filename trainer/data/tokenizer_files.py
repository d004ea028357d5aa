"""Writes a tokenizer as the files that transformers' AutoTokenizer opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.data.text import BPE, Bytes, Tokenizer
from trainer.data.vocabularies import letters


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into a directory; nothing for a tokenizer of another kind."""
    if isinstance(tokenizer, BPE):
        tokenizer.save(directory / "tokenizer.json")
        end = tokenizer.end_token
    elif isinstance(tokenizer, Bytes):
        end = BPE.END
        content = json.dumps(_of_bytes(end), ensure_ascii=False, indent=1)
        (directory / "tokenizer.json").write_text(content + "\n", encoding="utf-8")
    else:
        return
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _of_bytes(end: str) -> dict[str, Any]:
    """Returns the JSON of `tokenizers` for `Bytes`: byte pairs of which none is joined."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    vocabulary = {letter: byte for byte, letter in enumerate(letters())} | {end: Bytes.end}
    absent = dict.fromkeys(["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"])
    model = {"type": "BPE", **absent, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        **dict.fromkeys(["truncation", "padding", "normalizer", "post_processor"]),
        "added_tokens": [{"id": Bytes.end, "content": end, **flags, "special": True}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model | {"vocab": vocabulary, "merges": []},
    }
