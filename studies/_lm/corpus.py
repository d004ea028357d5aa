"""Holds the texts of a configuration, generated or read, divided into train, val and test. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from studies._lm.corpus_config import CorpusConfig, TextConfig
from studies._lm.source import Text, generate
from trainer.errors import DataError
from trainer.files import formats, tables
from trainer.files.paths import local
from trainer.files.shards import Shard, listed

PARTS = ("train", "val", "test")
Corpus = dict[str, dict[str, Text]]  # domain -> part -> its text; the target domain is always there


def prepare(data: TextConfig) -> Corpus:
    """Returns the texts of a configuration. Raises DataError, naming the file, for unusable ones."""
    if not data.path:
        return _generated(data.corpus.model_dump_json(), data.seed)
    paths = {"general": data.general_path} if data.general_path else {}
    return {domain: _read(path, data) for domain, path in (paths | {"target": data.path}).items()}


@lru_cache(maxsize=2)
def _generated(corpus: str, seed: int) -> Corpus:
    return generate(CorpusConfig.model_validate_json(corpus), seed)


def _read(path: str, data: TextConfig) -> dict[str, Text]:
    documents: list[bytes] = []
    for shard in shards(path, data.split):
        with shard.opened() as file:
            documents += [document for document in _documents(file, data) if document.strip()]
    if not documents:
        raise DataError(f"{path} has no text in it: give a file of text, or a directory of such.")
    parts = _divided(documents, data.held_out)
    for part, texts in parts.items():
        if (size := sum(map(len, texts))) < data.block_size:  # an upper limit of the tokens, whatever the tokenizer
            raise DataError(
                f"{path} leaves {size} bytes to {part}, fewer than one block of {data.block_size} tokens: lower "
                "data.block_size, or give more text."
            )
    return {part: Text(texts) for part, texts in parts.items()}


def shards(path: str, split: str) -> list[Shard]:
    """Returns the files of a domain; `split` is read of a directory, as one of two domains may be a plain file."""
    return listed(path, split if local(path).is_dir() else "")


def _documents(file: Path, data: TextConfig) -> Iterable[bytes]:
    if formats.is_table(file):
        return (text.encode() for text in tables.read(file, [data.column], [data.column]).texts(data.column))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): give a file of text.") from error
    if data.tokenizer == "bpe":
        _check_utf8(file, content)
    return content.split(data.separator.encode()) if data.separator else [content]


def _check_utf8(file: Path, content: bytes) -> None:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file} line {line} is not UTF-8 (byte 0x{content[error.start]:02x}), which BPE needs: save it as UTF-8, "
            "or set data.tokenizer=bytes."
        ) from error


def _divided(documents: list[bytes], held_out: float) -> dict[str, list[bytes]]:
    """Returns train, val and test in order: the last shares of all bytes, cut exactly there, at a character."""
    size = sum(map(len, documents))
    stops = [round(size * (1 - 2 * held_out)), round(size * (1 - held_out)), size]
    parts: dict[str, list[bytes]] = {part: [] for part in PARTS}
    start = 0
    for document in documents:
        begin = 0
        for part, stop in zip(PARTS, stops, strict=True):
            end = _character(document, min(max(stop - start, begin), len(document)))
            if end > begin:
                parts[part].append(document[begin:end])
            begin = max(end, begin)
        start += len(document)
    return parts


def _character(text: bytes, start: int) -> int:
    """Returns `start`, or the next start of a UTF-8 character; at most three continuation bytes follow."""
    for end in range(start, min(start + 4, len(text))):
        if text[end] & 0xC0 != 0x80:
            return end
    return min(start, len(text)) if start + 4 < len(text) else len(text)
