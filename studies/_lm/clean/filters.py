"""Takes a batch of documents through the steps that look at a single document, and stores those that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from studies._lm.clean import leaks, minhash, personal, rules
from studies._lm.clean.documents import Document
from studies._lm.clean.settings import EXACT, NEAR, PERSONAL, Settings
from studies._lm.clean.store import Tally, line_of, publish, size_of

EMPTY, LANGUAGE, LEAKS = "empty", "language", "leaks"


@dataclass(frozen=True)
class Batch:
    """Successive documents of the input, as many as fill a shard."""

    number: int
    documents: Sequence[Document]


def kept(work: Path, number: int, suffix: str) -> Path:
    """Returns a file of a batch: `jsonl`, `digests`, `signatures`, and `json`, written last."""
    return work / "kept" / f"{number:06d}.{suffix}"


def index_of(work: Path) -> Path:
    return work / "leaks.hashes"


def filter_batch(settings: Settings, work: Path, batch: Batch) -> None:
    """Stores what the steps leave of a batch, with its digests and signatures."""
    tally = Tally()
    steps = _steps(settings, work)
    lines: list[bytes] = []
    digests: list[bytes] = []
    signatures: list[bytes] = []
    for document in batch.documents:
        for left in _left(document, steps, tally):
            lines.append(line_of(left).encode())
            if settings.runs(EXACT):
                digests.append(minhash.digest(left.text))
            if settings.runs(NEAR):
                signatures.append(minhash.signature(left.text).tobytes())
    for suffix, parts in (("jsonl", lines), ("digests", digests), ("signatures", signatures)):
        publish(kept(work, batch.number, suffix), b"".join(parts))
    tally.read.parts = len(lines)
    tally.save(kept(work, batch.number, "json"))


# Takes a document, counts the loss, and returns what is left of it: itself, none, or pieces.
Step = Callable[[Document, Tally], list[Document]]


def _left(document: Document, steps: Sequence[Step], tally: Tally) -> Iterator[Document]:
    tally.read.documents += 1
    tally.read.bytes += size_of(document.text)
    left = [document]
    for step in steps:
        left = [piece for whole in left for piece in step(whole, tally)]
    yield from left


@lru_cache(maxsize=1)
def _steps(settings: Settings, work: Path) -> tuple[Step, ...]:
    lines = tuple(name for name in rules.LINE_RULES if settings.runs(name))
    documents = tuple(name for name in rules.DOCUMENT_RULES if settings.runs(name))
    steps: list[Step] = []
    # Before the rules, so that no example in the report shows an address.
    if settings.runs(PERSONAL):
        steps.append(_without_addresses)
    if lines:
        steps.append(lambda document, tally: _without_lines(document, tally, lines))
    steps.append(lambda document, tally: _ruled(document, tally, documents))
    if settings.language:
        from studies._lm.clean.language import language_of

        steps.append(lambda document, tally: _spoken(document, tally, settings.language, language_of))
    if settings.against:
        index = leaks.read_index(index_of(work))
        steps.append(lambda document, tally: _unleaked(document, tally, index))
    return tuple(steps)


def _without_addresses(document: Document, tally: Tally) -> list[Document]:
    text, counts = personal.replaced(document.text)
    if not counts:
        return [document]
    for kind, count in counts.items():
        tally.replaced[kind] = tally.replaced.get(kind, 0) + count
    mark = personal.PLACEHOLDERS[next(iter(counts))]
    excerpt = text[max(text.find(mark) - 60, 0) :]
    tally.take(PERSONAL, size_of(document.text) - size_of(text), document, excerpt, parts=counts.total())
    return [document._replace(text=text)]


def _without_lines(document: Document, tally: Tally, names: Sequence[str]) -> list[Document]:
    text, gone = rules.cut_lines(document.text, names)
    sizes: Counter[str] = Counter()
    for name, line in gone:
        sizes[name] += size_of(line) + 1
    if gone:  # the last line has no line feed
        sizes[gone[-1][0]] += size_of(document.text) - size_of(text) - sizes.total()
    for name, size in sizes.items():
        lines = [line for rule, line in gone if rule == name]
        tally.take(name, size, document, lines[0], parts=len(lines))
    return [document._replace(text=text)] if gone else [document]


def _ruled(document: Document, tally: Tally, names: Sequence[str]) -> list[Document]:
    name = rules.broken(document.text, names) if document.text.strip() else EMPTY
    return [document] if name is None else _gone(document, tally, name)


def _spoken(document: Document, tally: Tally, wanted: str, language_of: Callable[[str], str]) -> list[Document]:
    language = language_of(document.text)
    return [document] if language == wanted else _gone(document, tally, LANGUAGE, f"{language}: {document.text[:1000]}")


def _unleaked(document: Document, tally: Tally, index: np.ndarray) -> list[Document]:
    pieces = leaks.cut(document.text, index)
    if pieces is None:
        return [document]
    size = size_of(document.text) - sum(map(size_of, pieces))
    # Each piece is a document of its own, so that no sentence runs across the cut.
    tally.take(LEAKS, size, document, document.text, documents=1 - len(pieces), parts=1)
    return [document._replace(text=piece) for piece in pieces]


def _gone(document: Document, tally: Tally, step: str, excerpt: str = "") -> list[Document]:
    tally.take(step, size_of(document.text), document, excerpt or document.text, documents=1)
    return []
