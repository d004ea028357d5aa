"""Turns texts into tokens once: memory-mapped files that all trials share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from studies._lm.corpus import PARTS, Corpus, prepare, shards
from studies._lm.corpus_config import TextConfig
from trainer.data import TokenFile, write_tokens
from trainer.data.text import BPE, Bytes, Tokenizer
from trainer.errors import DataError

BPE_FILE, ABOUT = "bpe.json", "about.json"
VERSION = 3  # format version of the cache
# The fields that decide the tokens, besides the files themselves.
DECIDE = {
    "column",
    "separator",
    "tokenizer",
    "vocab_size",
    "end_token",
    "tiktoken_pattern",
    "held_out",
    "seed",
    "corpus",
}
STALE = 3600.0  # seconds after which an unfinished directory is abandoned


class Tokens:
    """The token files of a configuration, made on first use; after that the texts are not tokenised again.

    They are kept in `data.cache`, else in `shared` for all trials, else for as long as this process lives.
    `files[domain, part]` are the files, `bytes` the size of each text, and `nats` its cost by its source, if known.
    """

    def __init__(self, data: TextConfig, shared: Path | None = None) -> None:
        directory = _cached(data, Path(data.cache or shared or _own().name) / "tokens")
        about: dict[str, Any] = json.loads((directory / ABOUT).read_text())
        self.tokenizer = _opened(data, directory / BPE_FILE) if data.tokenizer == "bpe" else Bytes()
        self.domains = tuple(about)
        names = [(domain, part) for domain in self.domains for part in PARTS]
        self.files = {name: TokenFile(directory / f"{'-'.join(name)}.json") for name in names}
        self.bytes: dict[tuple[str, str], int] = {name: about[name[0]][name[1]]["bytes"] for name in names}
        self.nats: dict[tuple[str, str], float | None] = {name: about[name[0]][name[1]]["nats"] for name in names}


def tokenizer_of(data: TextConfig) -> Tokenizer:
    """Returns the tokenizer of a configuration; the texts are read only if it must be learnt from them."""
    if data.tokenizer == "bytes":
        return Bytes()
    return _opened(data, Path()) if data.tokenizer_file else Tokens(data).tokenizer


def _cached(data: TextConfig, root: Path) -> Path:
    """Returns the directory with the token files of these texts and this tokenizer.

    Any number of processes may make it.
    """
    cache = root / _key(data)
    if not cache.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as temporary:
            made = Path(temporary) / "tokens"
            made.mkdir()
            _write(made, data, prepare(data))
            try:
                made.rename(cache)
            except OSError:
                if not cache.is_dir():  # else another process was quicker, and made the same
                    raise
    return cache


@cache
def _own() -> tempfile.TemporaryDirectory[str]:
    """Returns this process's directory, which is removed with the process."""
    return tempfile.TemporaryDirectory(prefix="hpo-tokens-", ignore_cleanup_errors=True)


def _sweep(root: Path) -> None:
    """Removes directories whose writer was killed."""
    for left in root.glob(".new-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left, ignore_errors=True)


def _key(data: TextConfig) -> str:
    """Returns a digest of the configuration and of the contents of the files that it names, wherever they are."""
    texts = [_content(path, data.split) for path in (data.path, data.general_path)]
    texts.append(_content(data.tokenizer_file))
    parts = [VERSION, data.model_dump(mode="json", include=DECIDE), texts]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _content(path: str, split: str = "") -> list[list[str]]:
    """Returns the suffix and the digest of each file that a path names, in order."""
    try:
        return [[shard.suffix, shard.digest()] for shard in shards(path, split)] if path else []
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is not there, and the tokens are made of it: put it back, or give its place."
        ) from error


def _opened(data: TextConfig, learnt: Path) -> BPE:
    """Returns the configured tokenizer, else the learnt one. Raises DataError if it has more tokens than the model."""
    if not data.tokenizer_file:
        return BPE.load(learnt)
    custom = BPE.load(data.tokenizer_file, data.end_token, data.tiktoken_pattern)
    if custom.vocab_size > data.vocab_size:
        raise DataError(
            f"{data.tokenizer_file} has {custom.vocab_size} tokens and data.vocab_size is {data.vocab_size}: set it to "
            f"{custom.vocab_size} or more."
        )
    return custom


def _write(directory: Path, data: TextConfig, corpus: Corpus) -> None:
    tokenizer: Tokenizer = Bytes()
    if data.tokenizer_file:
        tokenizer = _opened(data, directory)
    elif data.tokenizer == "bpe":
        texts = (document.decode() for parts in corpus.values() for document in parts["train"].documents)
        tokenizer = BPE.train(texts, data.vocab_size)
        tokenizer.save(directory / BPE_FILE)
    for domain, parts in corpus.items():
        for part, text in parts.items():
            write_tokens(directory / f"{domain}-{part}.json", _encoded(text.documents, tokenizer), data.vocab_size)
    about = {
        domain: {part: {"bytes": text.bytes, "nats": text.nats} for part, text in parts.items()}
        for domain, parts in corpus.items()
    }
    (directory / ABOUT).write_text(json.dumps(about))


def _encoded(documents: list[bytes], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields each document between two ends, so that its first token and its end are predicted too."""
    for document in documents:
        ids = list(document) if isinstance(tokenizer, Bytes) else tokenizer.encode(document.decode())
        yield [tokenizer.end, *ids, tokenizer.end]
