"""Turns a model of SentencePiece (Kudo & Richardson 2018), unigram or BPE, into a tokenizer of `tokenizers`.

SentencePiece treats a text as a whole: it is normalised by the model's table, runs of spaces become one if the model
says so, a space is put first, each space becomes ▁, and the pieces that make the best score, or those that the pairs
lead to, divide it. Control pieces are never read from a text, and user-defined symbols always are.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.files.protobuf import BOOL, BYTES, FLOAT, INT32, STRING, Field, message_type

SPACE = "▁"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_MISSING = "Models of SentencePiece need protobuf: pip install 'hpo[tfrecord]'."
# The fields of sentencepiece_model.proto that decide ids.
_MESSAGES: Mapping[str, Sequence[Field]] = {
    "Piece": [("piece", 1, STRING, False), ("score", 2, FLOAT, False), ("type", 3, INT32, False)],
    "Trainer": [
        ("model_type", 3, INT32, False),
        ("treat_whitespace_as_suffix", 24, BOOL, False),
        ("byte_fallback", 35, BOOL, False),
    ],
    "Normalizer": [
        ("name", 1, STRING, False),
        ("precompiled_charsmap", 2, BYTES, False),
        ("add_dummy_prefix", 3, BOOL, False),
        ("remove_extra_whitespaces", 4, BOOL, False),
        ("escape_whitespaces", 5, BOOL, False),
    ],
    "Model": [
        ("pieces", 1, "Piece", True),
        ("trainer_spec", 2, "Trainer", False),
        ("normalizer_spec", 3, "Normalizer", False),
    ],
}
_DEFAULTS = {"type": NORMAL, "model_type": UNIGRAM}  # those that are neither 0 nor false
_DEFAULTS |= dict.fromkeys(["add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"], True)


def from_sentencepiece(library: Any, file: Path) -> Any:
    """Returns the tokenizer of a `.model`, with its ids. Raises DataError for a file that is not such a model."""
    model = _parsed(file)
    if _field(model.trainer_spec, "model_type") not in (UNIGRAM, BPE):
        raise DataError(f"{file} is a model of words or of characters: give one of SentencePiece's unigram or bpe.")
    if model.trainer_spec.treat_whitespace_as_suffix or not _field(model.normalizer_spec, "escape_whitespaces"):
        raise DataError(
            f"{file} has treat_whitespace_as_suffix, or not escape_whitespaces: train it with SentencePiece's defaults."
        )
    kinds = {piece.piece: _field(piece, "type") for piece in model.pieces}
    symbols = sorted((piece for piece, kind in kinds.items() if kind == USER_DEFINED), key=len, reverse=True)
    unigram = _field(model.trainer_spec, "model_type") == UNIGRAM
    tokenizer = library.Tokenizer(_unigram(library, model) if unigram else _pairs(library, model, symbols))
    try:
        tokenizer.normalizer = _normalizer(library, model.normalizer_spec)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} has a table of normalisation that cannot be read: copy or train it anew.") from error
    for symbol in symbols:
        if symbol not in tokenizer.normalizer.normalize_str(f"a{symbol}a"):
            raise DataError(
                f"{file} has the user-defined symbol {symbol!r}, which its own normalisation changes: train it with "
                "normalization_rule_name=identity, or without the symbol."
            )
    if unigram:
        tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(_cuts(kinds)), "merged_with_previous")
    elif symbols:
        pattern = "|".join(map(re.escape, symbols))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    tokenizer.decoder = _decoder(library, model.normalizer_spec)
    tokenizer.add_special_tokens([piece for piece, kind in kinds.items() if kind in (UNKNOWN, CONTROL)])
    return tokenizer


def _parsed(file: Path) -> Any:
    model: Any = _model_type()()
    from google.protobuf.message import DecodeError

    try:
        model.ParseFromString(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): give the file of a tokenizer.") from error
    except DecodeError as error:
        raise DataError(f"{file} cannot be parsed as a model of SentencePiece: copy or train it anew.") from error
    if not {UNKNOWN, NORMAL} <= {_field(piece, "type") for piece in model.pieces}:
        raise DataError(
            f"{file} has no piece for what is unknown, or none for text, so it is not a model of SentencePiece."
        )
    pieces = [piece.piece for piece in model.pieces]
    if len({*pieces}) < len(pieces) or any(isinstance(piece, bytes) for piece in pieces):
        raise DataError(f"{file} has a piece twice, or one that is not UTF-8: copy or train it anew.")
    return model


@cache
def _model_type() -> type[object]:
    return message_type(_MESSAGES, "Model", _MISSING)


def _field(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else _DEFAULTS[name]


def _unigram(library: Any, model: Any) -> Any:
    """Returns the unigram model; a symbol has the score by which SentencePiece always prefers it."""
    kinds = [_field(piece, "type") for piece in model.pieces]
    best = max(piece.score for piece, kind in zip(model.pieces, kinds, strict=True) if kind == NORMAL)
    scores = [
        len(piece.piece.encode()) * best - 0.1 if kind == USER_DEFINED else piece.score
        for piece, kind in zip(model.pieces, kinds, strict=True)
    ]
    vocabulary = list(zip([piece.piece for piece in model.pieces], scores, strict=True))
    fallback = model.trainer_spec.byte_fallback
    return library.models.Unigram(vocabulary, unk_id=kinds.index(UNKNOWN), byte_fallback=fallback)


def _cuts(kinds: Mapping[str, int]) -> str:
    """Returns a pattern of the first parts of pieces that are not read from a text, wherever it spells one.

    Next to the cut is a character that is known, if any is: a run of unknown ones is one token.
    """
    normal = {piece for piece, kind in kinds.items() if kind in (NORMAL, USER_DEFINED)}
    parts = []
    for piece in (piece for piece in kinds if piece not in normal and len(piece) > 1):
        cut = next((i for i in range(1, len(piece)) if normal & {piece[i - 1], piece[i]}), 1)
        parts.append(f"{re.escape(piece[:cut])}(?={re.escape(piece[cut:])})")
    return "|".join(parts)


def _pairs(library: Any, model: Any, symbols: Sequence[str]) -> Any:
    """Returns BPE that joins two neighbours if they make a piece, the piece of the highest score first."""
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    normal = {piece.piece: piece.score for piece in model.pieces if _field(piece, "type") == NORMAL}
    unknown = next(piece.piece for piece in model.pieces if _field(piece, "type") == UNKNOWN)
    return library.models.BPE(
        vocabulary,
        merges_of(sorted(normal, key=lambda piece: -normal[piece]), normal),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
        ignore_merges=bool(symbols),  # a symbol, which stands alone, is one token
    )


def merges_of(tokens: Iterable[str], known: Container[str]) -> list[tuple[str, str]]:
    """Returns all pairs of known tokens that make one of `tokens`, in the order of these."""
    cuts = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
    return [(left, right) for left, right in cuts if left in known and right in known]


def _normalizer(library: Any, spec: Any) -> Any:
    """Returns the model's normalisation.

    `Precompiled` looks a character up together with its accents, and drops those if the table has the character alone.
    NFKC before it, which the tables of these names extend, leaves no such character but capitals that are lowered and
    have no form with their accent. It also sorts several accents of one character into Unicode's order, which
    SentencePiece does not.
    """
    normalizers, steps = library.normalizers, []
    if spec.name.removeprefix("nmt_").startswith("nfkc"):
        steps.append(normalizers.NFKC())
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if _field(spec, "remove_extra_whitespaces"):
        steps.append(normalizers.Replace(library.Regex(r"\A +| +\z|(?<= ) +"), ""))
    if _field(spec, "add_dummy_prefix"):
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _decoder(library: Any, spec: Any) -> Any:
    decoders = library.decoders
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _field(spec, "add_dummy_prefix"):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
