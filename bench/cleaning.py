"""How well and how fast a corpus is cleaned: recall and precision of what was planted, throughput and peak memory.

python bench/cleaning.py [--mb 100] [--processes 2] [--directory DIR]

The corpus is of random words by Zipf's law, in sentences and paragraphs. Of its documents 3 % are copies of an earlier
one, but for case and white space, 3 % are copies with one word in a hundred replaced, a Jaccard similarity of some 0.9,
1 % hold 40 words of the validation text, and 3 % an e-mail address, a phone number, an IP address or a key. Every
document has a place of its own in the output, so what went is known by its row.

recall     of the planted copies, those that went; of leaks and addresses, those of which nothing is left
precision  of the documents that the step took, or the parts that it replaced, those planted
memory     of the largest process, by getrusage(2)
processor  the seconds of all processes, which other work on the machine changes less than those by the clock
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine

ROOT = Path(__file__).parent.parent
STOP_WORDS = ("the", "of", "to", "and", "that", "be", "have", "with")
ADDRESSES = ("email", "phone", "ip", "key")
COPIES = {"exact": "exact-duplicates", "near": "near-duplicates"}  # kind -> the step that takes it
_WORDS, _EARLIER = 30_000, 2_000  # of the vocabulary; documents that may be copied
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", "S1")


@dataclass
class Planted:
    """The rows that are copies, and by row the text that must not be in the output, by kind."""

    copies: dict[str, set[int]] = field(default_factory=lambda: {kind: set() for kind in COPIES})
    texts: dict[str, dict[int, str]] = field(default_factory=lambda: {kind: {} for kind in ("leak", *ADDRESSES)})
    documents: int = 0
    bytes: int = 0


class Writer:
    """Writes random documents."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        lengths = self.random.integers(3, 10, _WORDS)
        words = ["".join(map(bytes.decode, self.random.choice(_LETTERS, length))) for length in lengths]
        self.words = np.array([*STOP_WORDS, *words], object)
        shares = 1 / (np.arange(len(self.words)) + 8)
        self.ends = np.cumsum(shares / shares.sum())

    def some(self, count: int) -> list[str]:
        places = np.searchsorted(self.ends, self.random.random(count))
        return self.words[np.minimum(places, len(self.words) - 1)].tolist()

    def document(self) -> list[str]:
        """Returns the words of a document, with the ends of sentences and paragraphs."""
        words = self.some(int(self.random.integers(120, 700)))
        for end in range(11, len(words), 12):
            words[end] += ".\n\n" if (end + 1) % 60 == 0 else "."
        words[-1] = words[-1].rstrip(".\n") + "."
        return words

    def address(self, kind: str) -> str:
        number = int(self.random.integers(10**9, 10**10))
        digits = str(number)
        letters = "".join(map(bytes.decode, self.random.choice(_LETTERS, 24)))
        octets = self.random.integers(1, 255, 4)
        return {
            "email": f"{letters[:8]}.{digits[:4]}@{letters[8:16]}.example.org",
            "phone": f"+49 {digits[:3]} {digits[3:]}",
            "ip": ".".join(map(str, octets)),
            "key": f"AKIA{(letters + digits)[8:24].upper()}",
        }[kind]


def corpus(directory: Path, size: float, seed: int = 0) -> Planted:
    """Writes corpus.jsonl, of `size` bytes of text, and validation.txt; returns what was planted."""
    writer, planted = Writer(seed), Planted()
    validation = writer.some(20_000)
    (directory / "validation.txt").write_text(" ".join(validation))
    earlier: list[list[str]] = []
    with (directory / "corpus.jsonl").open("w") as lines:
        while planted.bytes < size:
            planted.documents += 1
            text = _text(writer, planted, validation, earlier)
            planted.bytes += len(text)
            lines.write(json.dumps({"text": text}) + "\n")
    return planted


def _text(writer: Writer, planted: Planted, validation: list[str], earlier: list[list[str]]) -> str:
    """Returns the next document. Those with something planted in them are never copied."""
    draw, row, random = writer.random.random(), planted.documents, writer.random
    if draw < 0.06 and len(earlier) > 10:
        words = list(earlier[int(random.integers(len(earlier)))])
        if draw < 0.03:
            planted.copies["exact"].add(row)
            return " ".join(words).upper().replace(" ", "  ")
        planted.copies["near"].add(row)
        for place in random.choice(len(words) - 1, max(1, len(words) // 100), replace=False):
            words[place] = f"changed{row}" + words[place].lstrip("abcdefghijklmnopqrstuvwxyz")
        return " ".join(words)
    words = writer.document()
    place = len(words) // 2
    if draw < 0.07:
        start = int(random.integers(len(validation) - 40))
        words[place:place] = (leak := validation[start : start + 40])
        planted.texts["leak"][row] = " ".join(leak)
    elif draw < 0.10:
        kind = ADDRESSES[int(random.integers(len(ADDRESSES)))]
        words.insert(place, address := writer.address(kind))
        planted.texts[kind][row] = address
    else:
        earlier.append(words)
        if len(earlier) > _EARLIER:
            earlier[int(random.integers(_EARLIER))] = earlier.pop()
    return " ".join(words)


def command(directory: Path, processes: int) -> list[str]:
    """Returns the command that cleans the corpus of a directory into its `clean`."""
    clean = [sys.executable, "-m", "studies._lm.clean", str(directory / "corpus.jsonl"), str(directory / "clean")]
    return [*clean, "--against", str(directory / "validation.txt"), "--processes", str(processes)]


def measured(directory: Path, planted: Planted) -> Iterator[tuple[str, float, float, int]]:
    """Yields (kind, recall, precision, number planted) of the cleaned corpus, for each kind that was planted."""
    report = json.loads((directory / "clean" / "report.json").read_text())
    steps = {step["step"]: step for step in report["steps"]}
    kinds = {row: kind for kind, texts in planted.texts.items() for row in texts}
    stayed: set[int] = set()
    left: dict[str, set[int]] = {kind: set() for kind in planted.texts}
    for shard in sorted((directory / "clean" / "shards").iterdir()):
        for line in shard.read_text().splitlines():
            record = json.loads(line)
            stayed.add(row := record["row"])
            if (kind := kinds.get(row)) and _holds(record["text"], planted.texts[kind][row], kind):
                left[kind].add(row)
    # A near copy that equals another one goes with the exact copies.
    copies = set[int]().union(*planted.copies.values())
    precision = len(copies - stayed) / max(sum(steps[step]["documents"] for step in COPIES.values()), 1)
    for kind, rows in planted.copies.items():
        if rows:
            yield kind, len(rows - stayed) / len(rows), precision, len(rows)
    for kind, texts in planted.texts.items():
        taken = steps["leaks"]["parts"] if kind == "leak" else report["replaced"].get(kind, 0)
        if texts:
            gone = len(texts) - len(left[kind])
            yield kind, gone / len(texts), gone / max(taken, 1), len(texts)


def _holds(text: str, planted: str, kind: str) -> bool:
    """Returns True if a text holds what was planted; of a leak, 13 words in a row of it."""
    if kind != "leak":
        return planted in text
    words, leak = text.replace(".", "").split(), planted.split()
    runs = {tuple(leak[start : start + 13]) for start in range(len(leak) - 12)}
    return any(tuple(words[start : start + 13]) in runs for start in range(len(words) - 12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--directory", help="where the corpus and its clean form stay [a temporary one]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.directory or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        planted = corpus(directory, options.mb * 1e6)
        print(machine())
        start = time.perf_counter()
        subprocess.run(command(directory, options.processes), check=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        print(f"{planted.documents:,} documents, {planted.bytes / 1e6:.1f} MB, {options.processes} processes")
        print(f"{seconds:.1f} s by the clock, {planted.bytes / 1e6 / seconds:.2f} MB/s")
        print(f"{busy:.1f} s of a processor, {planted.bytes / 1e6 / busy:.2f} MB/s")
        print(f"{memory:.0f} MiB in the largest process")
        print("planted       number  recall  precision")
        for kind, recall, precision, number in measured(directory, planted):
            print(f"{kind:12} {number:7} {recall:7.4f} {precision:10.4f}")


if __name__ == "__main__":
    main()
