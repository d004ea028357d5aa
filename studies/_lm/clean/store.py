"""Writes files whole or not at all, and counts what each step takes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from studies._lm.clean.documents import Document
from trainer.files import durable

MOST_EXAMPLES, MOST_CHARACTERS = 3, 160


@dataclass
class Entry:
    """The loss by one step: whole documents, lines or pieces within others, bytes, and the first few examples."""

    documents: int = 0
    parts: int = 0
    bytes: int = 0
    examples: list[dict[str, str | int]] = field(default_factory=list)


class Tally:
    """The counts of steps, by their names; `read` and `written` count documents and bytes before and after."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.replaced: dict[str, int] = {}
        self.read, self.written = Entry(), Entry()

    def take(
        self,
        step: str,
        size: int,
        document: Document,
        excerpt: str,
        *,
        documents: int = 0,
        parts: int = 0,
        like: str = "",
    ) -> None:
        """Counts what a step takes from a document."""
        entry = self.entries.setdefault(step, Entry())
        entry.documents += documents
        entry.parts += parts
        entry.bytes += size
        if len(entry.examples) < MOST_EXAMPLES:
            text = " ".join(excerpt[: 4 * MOST_CHARACTERS].split())[:MOST_CHARACTERS]
            example: dict[str, str | int] = {"file": document.file, "row": document.row, "text": text}
            entry.examples.append(example | ({"like": like} if like else {}))

    def add(self, other: Tally) -> None:
        """Adds the counts of later documents."""
        pairs = [(self.entries.setdefault(step, Entry()), entry) for step, entry in other.entries.items()]
        for sum_of, entry in [*pairs, (self.read, other.read), (self.written, other.written)]:
            sum_of.documents += entry.documents
            sum_of.parts += entry.parts
            sum_of.bytes += entry.bytes
            sum_of.examples = (sum_of.examples + entry.examples)[:MOST_EXAMPLES]
        for kind, count in other.replaced.items():
            self.replaced[kind] = self.replaced.get(kind, 0) + count

    def save(self, path: Path) -> None:
        entries = {step: asdict(entry) for step, entry in self.entries.items()}
        state = {"read": asdict(self.read), "written": asdict(self.written), "entries": entries}
        publish(path, json.dumps(state | {"replaced": self.replaced}).encode())

    @classmethod
    def load(cls, path: Path) -> Tally:
        state = json.loads(path.read_bytes())
        tally = cls()
        tally.read, tally.written = Entry(**state["read"]), Entry(**state["written"])
        tally.entries = {step: Entry(**entry) for step, entry in state["entries"].items()}
        tally.replaced = state["replaced"]
        return tally


def total(paths: Iterable[Path]) -> Tally:
    """Returns the sum of stored counts."""
    tally = Tally()
    for path in paths:
        tally.add(Tally.load(path))
    return tally


def publish(path: Path, content: bytes) -> None:
    """Makes `content` that of a file, durably: after a crash the file is whole or not there."""
    with durable.replacing(path) as temporary:
        temporary.write_bytes(content)
        durable.sync(temporary)


def size_of(text: str) -> int:
    """Returns the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def line_of(document: Document) -> str:
    """Returns a document as a line of JSON Lines."""
    return json.dumps({"text": document.text, "file": document.file, "row": document.row}, ensure_ascii=False) + "\n"
