"""Hashes words and runs of words, equal in every process and every run; numpy only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Hashes = np.ndarray  # [count] of uint64
WORD = re.compile(r"\w+")
_MOST_WORDS = 1_000_000  # of the cache, some 100 MB
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication by it loses no bits
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # of MurmurHash3's finaliser
_SHIFT = np.uint64(33)


class _Cache(dict[str, bytes]):
    def __missing__(self, word: str) -> bytes:
        if len(self) >= _MOST_WORDS:
            self.clear()
        digest = self[word] = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return digest


_CACHE = _Cache()


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation: as many as WORD has matches in the text."""
    return WORD.findall(text.lower()) if text.isascii() else [word.lower() for word in WORD.findall(text)]


def hashed(words: Sequence[str]) -> Hashes:
    """Returns a hash of each word."""
    return np.frombuffer(b"".join(map(_CACHE.__getitem__, words)), "<u8")


@lru_cache(maxsize=1)
def word_hashes(text: str) -> Hashes:
    """Returns a hash of each word of a text, in lower case and without punctuation."""
    return hashed(words_of(text))


def runs(hashes: Hashes, length: int) -> Hashes:
    """Returns a hash of each run of `length` successive words; none if there are fewer words."""
    count = len(hashes) - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    total = hashes[:count].copy()
    for start in range(1, length):
        total *= _MULTIPLIER
        total += hashes[start : start + count]
    return mixed(total)


def mixed(values: Hashes) -> Hashes:
    """Returns values in which every bit depends on all bits of the values given."""
    values = values ^ (values >> _SHIFT)
    for factor in _MIX:
        values = values * factor
        values ^= values >> _SHIFT
    return values


def covered(marks: np.ndarray, length: int) -> np.ndarray:
    """Returns which words are in a marked run of `length` words, from marks of the runs."""
    words = np.zeros(len(marks) + length - 1, bool)
    for start in range(length):
        words[start : start + len(marks)] |= marks
    return words
