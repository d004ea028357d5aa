"""Estimates how alike two texts are, by MinHash (Broder 1997); numpy only.

The Jaccard similarity of two texts is the share of their runs of 5 words that both have. A signature has the least
hash of a text's runs in each of 128 permutations; two signatures agree in as many places as the texts are alike.
"""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np

from studies._lm.clean.grams import hashed, mixed, runs, word_hashes

WORDS, PERMUTATIONS = 5, 128
CAUGHT = 0.95  # of pairs whose similarity is the threshold
_ROWS = 512  # runs times permutations that are computed at once fit a processor's cache
_FACTORS, _TERMS = (hashed([f"{name} {number}" for number in range(PERMUTATIONS)]) for name in ("factor", "term"))
_FACTORS = _FACTORS | np.uint64(1)


def digest(text: str) -> bytes:
    """Returns 16 bytes of the sha256 of a text in NFC and lower case, with one space for white space."""
    normal = " ".join(unicodedata.normalize("NFC", text).lower().split())
    return hashlib.sha256(normal.encode()).digest()[:16]


def shingles(text: str) -> np.ndarray:
    """Returns the hashes of the runs of 5 words, each once; of a shorter text, that of all its words."""
    words = word_hashes(text)
    return np.unique(runs(words, min(WORDS, len(words)) or 1))


def signature(text: str) -> np.ndarray:
    """Returns [128] of uint32. A text without words has the largest number everywhere.

    The permutations are multiply-shift hashes (Dietzfelbinger et al. 1997). Dropping the low 32 bits keeps the order,
    so it is done after the minimum.
    """
    grams = shingles(text)
    least = np.full(PERMUTATIONS, np.iinfo(np.uint64).max)
    for start in range(0, len(grams), _ROWS):
        values = grams[start : start + _ROWS, None] * _FACTORS
        values += _TERMS
        np.minimum(least, values.min(axis=0), out=least)
    return (least >> np.uint64(32)).astype(np.uint32)


def alike(first: np.ndarray, second: np.ndarray) -> np.ndarray | float:
    """Returns the estimated Jaccard similarity of signatures [..., 128]."""
    return (first == second).mean(axis=-1)


def bands_of(threshold: float) -> tuple[int, int]:
    """Returns (bands, rows): the most rows with which a pair at the threshold shares a band in 95 % of cases.

    A band of r rows is equal with probability s^r for a similarity of s, so one of b is with 1 - (1 - s^r)^b. More rows
    make fewer pairs candidates. At 0.8 it is 18 bands of 7 rows.
    """
    for rows in range(PERMUTATIONS, 1, -1):
        bands = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= CAUGHT:
            return bands, rows
    return PERMUTATIONS, 1


def band_keys(signatures: np.ndarray, band: int, rows: int) -> np.ndarray:
    """Returns a hash of a band of each signature [count, 128]."""
    total = np.zeros(len(signatures), np.uint64)
    for column in range(band * rows, (band + 1) * rows):
        total = mixed(total + signatures[:, column].astype(np.uint64) + np.uint64(1))
    return total
