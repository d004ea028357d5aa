"""Turns text into tokens: raw bytes, or byte pairs (BPE, Sennrich et al. 2016) learnt by `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.data.cache import publish
from trainer.data.vocabularies import opened, tokenizers
from trainer.errors import DataError

# White space as such, in a byte-level vocabulary, and in SentencePiece's.
_SPACES = {*" \t\n\r\v\f", *"\u0120\u0109\u010a\u010d", "\u2581"}
SHOWN = 5  # special tokens that an error names
_CUT = "\ud800"  # a lone surrogate, which no text contains


class Tokenizer(Protocol):
    """Maps text to ids below `vocab_size` and back. `end` is the id that ends a document."""

    vocab_size: int
    end: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """UTF-8 bytes, and 256 for the end of a document: nothing to learn, nothing unknown."""

    vocab_size = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def as_text(encode: Callable[[str], list[int]], text: str, end: int, spelling: str) -> list[int]:
    """Returns the ids of `text` as plain text, in which `spelling` does not end a document.

    If `encode` takes it for the token `end`, it is cut after its first character.
    """
    ids = encode(text)
    if end not in ids or len(spelling) < 2:
        return ids
    cut = text.replace(spelling, f"{spelling[0]}{_CUT}{spelling[1:]}")
    return [number for piece in cut.split(_CUT) for number in encode(piece)]


class BPE:
    """Byte-level byte-pair encoding, learnt by `BPE.train` and stored as the JSON of `tokenizers`.

    It also wraps any other tokenizer of that library, in which `end_token` ends a document. A text is data: a special
    token spelled in it is encoded like any other characters.
    """

    END = "<|end|>"

    def __init__(self, tokenizer: Any, end_token: str = END) -> None:
        self._tokenizer, self.end_token = tokenizer, end_token
        tokenizer.encode_special_tokens = True  # as text
        self.vocab_size: int = max(tokenizer.get_vocab().values(), default=-1) + 1  # some files leave ids out
        end = tokenizer.token_to_id(end_token)
        if end is None:
            special = [repr(token.content) for token in tokenizer.get_added_tokens_decoder().values() if token.special]
            theirs = f"such as {', '.join(special[:SHOWN])}" if special else "though none of its tokens is special"
            raise DataError(
                f"the tokenizer has no token {end_token!r} to end a document with: name one of its own as end_token, "
                f"{theirs}."
            )
        self.end: int = end

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPE:
        """Learns `vocab_size` tokens, including the 256 bytes and the end; the same texts give the same tokens."""
        library = tokenizers()
        if vocab_size < 257:
            raise DataError(f"vocab_size is {vocab_size}: give at least 257, for the bytes and the end of a document.")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[cls.END],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path, end_token: str = END, pattern: str = "cl100k") -> BPE:
        """Reads the output of `save`, another `tokenizer.json`, or a vocabulary of another library (`vocabularies`)."""
        tokenizer = opened(path, pattern)
        try:
            return cls(tokenizer, end_token)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        publish(Path(path), self._tokenizer.to_str().encode())

    def encode(self, text: str) -> list[int]:
        def encode(piece: str) -> list[int]:
            return self._tokenizer.encode(piece, add_special_tokens=False).ids

        return as_text(encode, text, self.end, self.end_token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token by its spelling, None if there is none."""
        return self._tokenizer.token_to_id(token)

    def spelling(self, number: int) -> str:
        """Returns the spelling of a token in the vocabulary, empty for an id without one."""
        return self._tokenizer.id_to_token(number) or ""

    def to_json(self) -> dict[str, Any]:
        """Returns the content of its tokenizer.json."""
        return json.loads(self._tokenizer.to_str())

    def __getstate__(self) -> tuple[str, str]:
        return self._tokenizer.to_str(), self.end_token

    def __setstate__(self, state: tuple[str, str]) -> None:
        self.__init__(tokenizers().Tokenizer.from_str(state[0]), state[1])


def word_begins(tokenizer: Tokenizer) -> list[bool]:
    """Returns for each id whether its token begins a word.

    A word begins with the white space before it, and in WordPiece with a token that does not continue one.
    """
    if not isinstance(tokenizer, BPE):
        return [byte in b" \t\n\r\v\f" for byte in range(256)] + [True]
    prefix = tokenizer.to_json()["model"].get("continuing_subword_prefix")
    spellings = [tokenizer.spelling(number) for number in range(tokenizer.vocab_size)]
    if prefix:
        return [not spelling.startswith(prefix) for spelling in spellings]
    return [spelling[:1] in _SPACES for spelling in spellings]
