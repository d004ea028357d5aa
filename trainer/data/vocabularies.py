"""Opens the vocabularies of other libraries as tokenizers of `tokenizers`, with the ids that those libraries give.

| file | library | what the file does not say |
|---|---|---|
| `*.model` | SentencePiece, unigram and BPE | nothing |
| `*.txt` | WordPiece, a token on each line | case: text is lowered and loses its accents if no token has a capital |
| `*.tiktoken` | tiktoken, on each line a token in base64 and its rank | what divides text before: one of `PATTERNS` |

Any other file is the JSON of `tokenizers`.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Any

from trainer.data.sentencepiece import from_sentencepiece, merges_of
from trainer.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"  # of a file of ranks, whose special tokens stand elsewhere
# The published patterns by which tiktoken's encodings divide text, as `tokenizers` spells them.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def opened(path: str | Path, pattern: str = "cl100k") -> Any:
    """Returns the tokenizer of a file, by its suffix; `pattern` is read for ranks of tiktoken. Raises DataError."""
    file, library = Path(path), tokenizers()
    if file.suffix == ".model":
        return from_sentencepiece(library, file)
    if file.suffix == ".txt":
        return _from_wordpiece(library, file)
    if file.suffix == ".tiktoken":
        return _from_ranks(library, file, PATTERNS[pattern])
    if not file.is_file():
        raise DataError(f"{file} cannot be read (No such file or directory): give the file of a tokenizer.")
    try:
        return library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} is not the JSON of a tokenizer ({error}).") from error


def tokenizers() -> Any:
    """Returns the library. Raises ConfigError if the extra is missing."""
    # Its threads do not survive the fork of a loader worker, and would be warned of there.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ConfigError("BPE needs tokenizers: pip install 'hpo[text]'.") from error
    return tokenizers


def letters() -> list[str]:
    """Returns the printable character that stands for each byte in a byte-level vocabulary, as GPT-2's.

    A byte that is printable in Latin-1 stands for itself, and the others for the characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): give the file of a tokenizer.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {error.start}): give a vocabulary as text.") from error


def _from_wordpiece(library: Any, file: Path) -> Any:
    """Returns BERT's tokenizer (Devlin et al. 2019) of a vocabulary; tokens in brackets, such as [SEP], are special."""
    vocabulary = {line.strip(): number for number, line in enumerate(_lines(file))}
    if "[UNK]" not in vocabulary:
        raise DataError(f"{file} has no line [UNK], so it is not a vocabulary of WordPiece: give such a vocab.txt.")
    special = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in vocabulary]
    uncased = not any(token != token.lower() for token in vocabulary if not token.startswith("["))
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=uncased)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _from_ranks(library: Any, file: Path, pattern: str) -> Any:
    """Returns byte-level BPE that joins as tiktoken does: of all neighbours that make a token, the lowest rank first.

    The end of a document takes the first free rank, as in GPT-2's vocabulary.
    """
    lines = [_rank(file, number, line) for number, line in enumerate(_lines(file), 1) if line]
    ranks = dict(lines)
    if lost := {bytes([byte]) for byte in range(256)} - ranks.keys():
        raise DataError(f"{file} has no rank for the byte 0x{min(lost).hex()}, and needs all 256: copy the file anew.")
    spelling = letters()
    spelled = {"".join(spelling[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = merges_of(sorted(spelled, key=spelled.__getitem__), spelled)
    if not len({*spelled.values()}) == len(spelled) == len(lines):
        raise DataError(f"{file} has a token or a rank on two of its {len(lines)} lines: copy the file anew.")
    if max(spelled.values()) > len(spelled):
        raise DataError(
            f"{file} has {len(spelled)} tokens and ranks up to {max(spelled.values())}: give a file without gaps."
        )
    spelled[END_OF_TEXT] = min({*range(len(spelled) + 1)} - {*spelled.values()})
    tokenizer = library.Tokenizer(library.models.BPE(spelled, merges, ignore_merges=True))
    divide = library.pre_tokenizers.Split(library.Regex(pattern), behavior="isolated")
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([divide, level])
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _rank(file: Path, number: int, line: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split(" ")
        if not rank.strip().isdecimal():
            raise ValueError(rank)
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error) as error:
        raise DataError(
            f"{file} line {number} is not a token in base64 and its rank: give a file of tiktoken's ranks."
        ) from error
