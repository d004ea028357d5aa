"""Cuts out what a validation text has too: runs of 13 words, by Brown et al. 2020 (arXiv 2005.14165, appendix C).

Around each shared run a window of 200 characters is cut, which divides the document into pieces. Pieces of fewer than
200 characters are dropped, and a document in more than 10 pieces is dropped whole. Unlike there, a run that occurs in
many documents counts too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from studies._lm.clean.grams import WORD, covered, runs, word_hashes

LENGTH, WINDOW, SHORTEST, MOST_PIECES = 13, 200, 200, 10
_BATCH = 1 << 20  # hashes that are sorted at once


def write_index(texts: Iterable[str], file: Path) -> int:
    """Writes the hashes of all runs of the texts, sorted, each once; returns how many texts are too short for a run.

    The file has 8 bytes for a run, and all are held once while it is written.
    """
    sorted_parts, waiting, size, short = np.empty(0, np.uint64), [np.empty(0, np.uint64)], 0, 0
    for text in texts:
        grams = runs(word_hashes(text), LENGTH)
        short += not len(grams)
        waiting.append(grams)
        size += len(grams)
        if size >= _BATCH:
            sorted_parts, waiting, size = np.unique(np.concatenate((sorted_parts, *waiting))), [], 0
    np.unique(np.concatenate((sorted_parts, *waiting))).tofile(file)
    return short


def read_index(file: Path) -> np.ndarray:
    """Returns the hashes of a file, mapped into memory, which processes share."""
    if not file.stat().st_size:
        return np.empty(0, np.uint64)
    return np.memmap(file, np.uint64, "r")


def cut(text: str, index: np.ndarray) -> list[str] | None:
    """Returns the pieces that are left of a text, or None if it shares no run with the index."""
    shared = _shared(runs(word_hashes(text), LENGTH), index)
    if not shared.any():
        return None
    words = list(WORD.finditer(text))
    marks = covered(shared, LENGTH)
    changes = np.flatnonzero(np.diff(np.concatenate(([0], marks.astype(np.int8), [0]))))
    pieces, begin = [], 0
    for first, end in zip(changes[::2], changes[1::2], strict=True):
        pieces.append(text[begin : max(words[first].start() - WINDOW, begin)])
        begin = min(words[end - 1].end() + WINDOW, len(text))
    pieces.append(text[begin:])
    if len(pieces) > MOST_PIECES:
        return []
    return [piece for piece in pieces if len(piece) >= SHORTEST]


def _shared(grams: np.ndarray, index: np.ndarray) -> np.ndarray:
    if not len(grams) or not len(index):
        return np.zeros(len(grams), bool)
    places = np.searchsorted(index, grams)
    places[places == len(index)] = 0
    return index[places] == grams
