"""Finds duplicates among any number of documents by files that are sorted part by part.

Memory holds one part of the hashes, and 9 bytes for a document in files that are mapped into it, which the kernel may
drop from memory at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies._lm.clean.filters import kept
from studies._lm.clean.minhash import PERMUTATIONS, alike, band_keys
from studies._lm.clean.store import publish

EXACT_KIND, NEAR_KIND = 1, 2
_RECORD = np.dtype([("key", "<u8"), ("check", "<u8"), ("doc", "<i8")])
_PART = 2**20  # records that are sorted at once, 24 MiB
_PAIRS = 4096  # whose signatures are read at once
_BLOCK = 2**20
_WIDTH = 4 * PERMUTATIONS  # bytes of a signature
_NO_WORDS = np.uint32(2**32 - 1)


@dataclass(frozen=True)
class Corpus:
    """The documents that the filters have left: `counts` of each batch, in the files of `work`."""

    work: Path
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def starts(self) -> np.ndarray:
        """Returns the number of documents before each batch, and of all."""
        return np.concatenate(([0], np.cumsum(np.array(self.counts, np.int64))))

    @property
    def firsts(self) -> Path:
        """Returns the file of the first document that each document is a duplicate of, itself if it stays."""
        return self.work / "firsts.i8"

    @property
    def kinds(self) -> Path:
        """Returns the file of each document's kind: 0 if it stays, 1 for an exact duplicate, 2 for a near one."""
        return self.work / "kinds.u1"

    def edges(self, band: int) -> Path:
        return self.work / f"edges-{band:03d}.i8"

    def opened(self, file: Path, kind: str, mode: str) -> np.ndarray:
        """Returns a file of one number for a document, mapped into memory."""
        if not self.size:
            return np.empty(0, kind)
        return np.memmap(file, kind, mode, shape=(self.size,))  # pyright: ignore[reportCallIssue, reportArgumentType]


def begin(corpus: Corpus) -> None:
    """Makes the files in which every document stays."""
    firsts = corpus.opened(corpus.firsts, "<i8", "w+")
    for start in range(0, corpus.size, _BLOCK):
        firsts[start : start + _BLOCK] = np.arange(start, min(start + _BLOCK, corpus.size))
    corpus.opened(corpus.kinds, "u1", "w+")


def mark_exact(corpus: Corpus) -> None:
    """Marks all but the first of the documents with one digest."""
    firsts, kinds = corpus.opened(corpus.firsts, "<i8", "r+"), corpus.opened(corpus.kinds, "u1", "r+")
    for first, doc, _ in _neighbours(_digests(corpus), corpus.work / "parts-exact", corpus.size):
        firsts[doc] = first
        kinds[doc] = EXACT_KIND


def _digests(corpus: Corpus) -> Iterator[np.ndarray]:
    for number, start in enumerate(corpus.starts[:-1]):
        digests = np.fromfile(kept(corpus.work, number, "digests"), "<u8").reshape(-1, 2)
        yield _records(digests[:, 0], digests[:, 1], start + np.arange(len(digests)))


def write_edges(corpus: Corpus, threshold: float, rows: int, band: int) -> None:
    """Writes the pairs of documents [pairs, 2] that share a band and whose signatures are alike.

    Each is compared with the first document of the same band and with the one before it.
    """
    records, starts = _bands(corpus, band, rows), corpus.starts
    edges = [np.empty((0, 2), np.int64)]
    for first, doc, before in _neighbours(records, corpus.work / f"parts-{band:03d}", corpus.size):
        pairs = np.concatenate((np.stack((first, doc), 1), np.stack((before, doc), 1)[before != first]))
        for start in range(0, len(pairs), _PAIRS):
            some = pairs[start : start + _PAIRS]
            left, right = (_signatures(corpus.work, starts, some[:, side]) for side in (0, 1))
            edges.append(some[alike(left, right) >= threshold])
    publish(corpus.edges(band), np.concatenate(edges).astype("<i8").tobytes())


def _bands(corpus: Corpus, band: int, rows: int) -> Iterator[np.ndarray]:
    kinds = corpus.opened(corpus.kinds, "u1", "r")
    for number, start in enumerate(corpus.starts[:-1]):
        signatures = np.fromfile(kept(corpus.work, number, "signatures"), "<u4").reshape(-1, PERMUTATIONS)
        compared = (kinds[start : start + len(signatures)] == 0) & (signatures[:, 0] != _NO_WORDS)
        keys = band_keys(signatures[compared], band, rows)
        yield _records(keys, np.zeros_like(keys), start + np.flatnonzero(compared))


def _signatures(work: Path, starts: np.ndarray, docs: np.ndarray) -> np.ndarray:
    """Returns the signatures [count, 128] of documents; files that are mapped would count as memory once touched."""
    rows = np.empty((len(docs), PERMUTATIONS), np.uint32)
    batches = np.searchsorted(starts, docs, side="right") - 1
    for batch in np.unique(batches):
        descriptor = os.open(kept(work, int(batch), "signatures"), os.O_RDONLY)
        try:
            for place in np.flatnonzero(batches == batch):
                offset = int(docs[place] - starts[batch]) * _WIDTH
                rows[place] = np.frombuffer(os.pread(descriptor, _WIDTH, offset), "<u4")
        finally:
            os.close(descriptor)
    return rows


def mark_near(corpus: Corpus, bands: int) -> None:
    """Marks all but the first document of each component that the pairs connect, by union-find.

    Of two roots the earlier one becomes the other's, so the root of a component is its first document.
    """
    firsts, kinds = corpus.opened(corpus.firsts, "<i8", "r+"), corpus.opened(corpus.kinds, "u1", "r+")

    def root(doc: int) -> int:
        while (above := int(firsts[doc])) != doc:
            firsts[doc] = firsts[above]
            doc = above
        return doc

    for first, second in _pairs(corpus, bands):
        roots = root(first), root(second)
        firsts[max(roots)] = min(roots)
    for pair in _pairs(corpus, bands):
        for doc in pair:
            if (first := root(doc)) != doc:
                firsts[doc] = first
                kinds[doc] = NEAR_KIND


def settle_exact(corpus: Corpus) -> None:
    """Makes exact duplicates of a near-duplicate those of the document that stays."""
    firsts, kinds = corpus.opened(corpus.firsts, "<i8", "r+"), corpus.opened(corpus.kinds, "u1", "r")
    for start in range(0, corpus.size, _BLOCK):
        docs = start + np.flatnonzero(kinds[start : start + _BLOCK] == EXACT_KIND)
        firsts[docs] = firsts[firsts[docs]]


def _pairs(corpus: Corpus, bands: int) -> Iterator[tuple[int, int]]:
    for band in range(bands):
        with corpus.edges(band).open("rb") as opened:
            while len(pairs := np.fromfile(opened, "<i8", 2 * _BLOCK).reshape(-1, 2)):
                yield from map(tuple, pairs.tolist())


def _records(keys: np.ndarray, checks: np.ndarray, docs: np.ndarray) -> np.ndarray:
    records = np.empty(len(keys), _RECORD)
    records["key"], records["check"], records["doc"] = keys, checks, docs
    return records


def _neighbours(
    records: Iterable[np.ndarray], directory: Path, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields, of documents that share their hashes with earlier ones, (the first, the document, the one before)."""
    for part in _parts(records, directory, size):
        ordered = part[np.lexsort((part["doc"], part["check"], part["key"]))]
        same = np.zeros(len(ordered), bool)
        hashes = [ordered[name] for name in ("key", "check")]
        same[1:] = np.logical_and.reduce([values[1:] == values[:-1] for values in hashes])
        docs = ordered["doc"]
        first = docs[~same][np.cumsum(~same) - 1]
        places = np.flatnonzero(same)
        yield first[places], docs[places], docs[places - 1]


def _parts(records: Iterable[np.ndarray], directory: Path, size: int) -> Iterator[np.ndarray]:
    """Yields the records in parts of about a million, those with one key in one part."""
    bits = max(0, (size - 1).bit_length() - (_PART - 1).bit_length())
    if not bits:
        yield np.concatenate([np.empty(0, _RECORD), *records])
        return
    directory.mkdir(exist_ok=True)
    files = [directory / f"{part:04d}" for part in range(2**bits)]
    for file in files:
        file.unlink(missing_ok=True)
    for some in records:
        parts = some["key"] >> np.uint64(64 - bits)
        for part in np.unique(parts):
            with files[int(part)].open("ab") as opened:
                some[parts == part].tofile(opened)
    for file in files:
        if file.exists():
            yield np.fromfile(file, _RECORD)
            file.unlink()
    directory.rmdir()


def marked(corpus: Corpus, batch: int) -> tuple[Sequence[int], Sequence[int]]:
    """Returns (kinds, firsts) of the documents of a batch."""
    start, end = (int(number) for number in corpus.starts[batch : batch + 2])
    if start == end:
        return [], []
    kinds, firsts = corpus.opened(corpus.kinds, "u1", "r"), corpus.opened(corpus.firsts, "<i8", "r")
    return kinds[start:end].tolist(), firsts[start:end].tolist()
