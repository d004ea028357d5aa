"""Extends the vocabulary of a model in Hugging Face's format for a new domain.

python -m studies.gpt.extend DIR NEW --tokens 500 data.path=law.jsonl     # further options as of `hpo run -o`

The tokens are those that save most on the domain's training part (added_tokens.py). A new token's row of the embedding,
and of a head of its own, begins as the mean of the rows of its pieces: the tokens of the base that it is made of
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; Sachidananda et al. 2021). NEW holds
the weights, the tokenizer, and `extension.json` with the pieces and the gain of each token.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from studies._lm.corpus import prepare
from studies._lm.directory import tensors
from studies._lm.exported import vacant
from studies.gpt import llama
from studies.gpt.added_tokens import Added, Extension
from studies.gpt.config import Config, DataConfig
from trainer.data.vocabularies import opened
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

REPORT = "extension.json"
COPIED = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
SHOWN = 20  # tokens that the command prints
ROWS = ("model.embed_tokens.weight", "lm_head.weight")  # a row for each token
Rows = Literal["mean", "random"]


def extend(directory: str, new: str, data: DataConfig, count: int, rows: Rows = "mean") -> dict[str, Any]:
    """Writes the extended model into a new directory; returns the report that is written beside it.

    `rows` "random" draws the new rows as an untrained model's, for comparison.
    """
    base, path = Path(directory), vacant(new)
    _, size = llama.read_config(base)
    tokenizer = opened(base / "tokenizer.json")
    tokenizer.encode_special_tokens = True  # as text
    extension, stored = Extension(tokenizer, base / "tokenizer.json"), tensors(base)
    for name in ROWS:
        if len(stored.get(name, stored.get(ROWS[0], ()))) != size:
            raise DataError(
                f"{base}: its {name} has not the {size} rows that config.json has as vocab_size: give a directory "
                "that transformers or `hpo export` has written."
            )
    texts = [document.decode() for document in prepare(data)["target"]["train"].documents]
    extension.choose(texts, count)
    if not extension.added:
        raise DataError(f"{base}: no pair of its tokens occurs twice in the training text: give more text.")
    path.mkdir(parents=True, exist_ok=True)
    for file in filter(Path.exists, (base / name for name in COPIED)):
        shutil.copy(file, path)
    wide = max(size, extension.added[-1].id + 1)
    fields = json.loads((base / "config.json").read_text(encoding="utf-8")) | {"vocab_size": wide}
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    extended = extension.tokenizer()
    extended.save(str(path / "tokenizer.json"))
    _save_rows(stored, wide, extension.added, rows, path / "model.safetensors")
    report = _report(texts, tokenizer, extended, extension.added)
    (path / REPORT).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def _save_rows(stored: dict[str, Tensor], size: int, added: Sequence[Added], rows: Rows, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    for name in ROWS:
        if name in stored:
            old = stored[name]
            wide = old.new_zeros(size, old.shape[1])
            wide[: len(old)] = old
            for token in added:
                drawn = torch.randn(old.shape[1], generator=generator) * (3 * old.shape[1]) ** -0.5
                mean = old[list(token.pieces)].float().mean(0)
                wide[token.id] = (mean if rows == "mean" else drawn).to(old.dtype)
            stored[name] = wide
    save_file(stored, file, metadata={"format": "pt"})


def _report(texts: Sequence[str], base: Any, extended: Any, added: Sequence[Added]) -> dict[str, Any]:
    """Returns bytes per token of the training text before and after, measured, and the tokens with their gains."""
    extended.encode_special_tokens = True
    size = sum(len(text.encode()) for text in texts)
    before, after = (
        sum(len(ids.ids) for ids in tokenizer.encode_batch(texts, add_special_tokens=False))
        for tokenizer in (base, extended)
    )
    tokens = [{"id": token.id, "token": token.token, "pieces": token.pieces, "saved": token.saved} for token in added]
    return {
        "tokens_added": len(added),
        "text_bytes": size,
        "tokens_before": before,
        "tokens_after": after,
        "bytes_per_token_before": size / before,
        "bytes_per_token_after": size / after,
        "tokens": tokens,
    }


def _shown(report: dict[str, Any]) -> str:
    """Returns the report as a few lines, of which the first say what it comes down to."""
    before, after = report["bytes_per_token_before"], report["bytes_per_token_after"]
    lines = [f"{report['tokens_added']} tokens added; {before:.3f} bytes per token before, {after:.3f} after"]
    lines += ["   saved  pieces  token"]
    lines += [f"{token['saved']:8d}  {len(token['pieces']):6d}  {token['token']}" for token in report["tokens"][:SHOWN]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    from hpo import load
    from hpo.errors import UserError
    from hpo.space.config import parse_override

    parser = argparse.ArgumentParser(prog="python -m studies.gpt.extend", description="Extends a vocabulary.")
    parser.add_argument("directory", metavar="DIR", help="a model in Hugging Face's format, with its tokenizer.json")
    parser.add_argument("new", metavar="NEW", help="a directory that is not there yet, or empty")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="of the study's data, such as data.path")
    parser.add_argument("--tokens", type=int, required=True, help="the most tokens to add")
    parser.add_argument("--rows", choices=["mean", "random"], default="mean", help="what new rows begin as")
    options = parser.parse_intermixed_args(arguments)
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}: give 1 or more.")
    try:
        overrides = dict(map(parse_override, options.overrides))
        if not overrides.get("data.path"):
            raise ConfigError("the text of the new domain is not given: name it by data.path=FILE.")
        config = load("gpt").configure({**overrides, "data.tokenizer": "bpe"}).config
        assert isinstance(config, Config)
        report = extend(options.directory, options.new, config.data, options.tokens, options.rows)
    except (UserError, ConfigError, DataError) as error:
        parser.exit(2, f"error: {error}\n")
    print(_shown(report))
    print(f"wrote {options.new}; `python -m studies.gpt.llama show {options.new}` prints how to train it")


if __name__ == "__main__":
    main()
