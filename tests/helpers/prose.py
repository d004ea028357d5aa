"""Counts prose that is not plain English, and holds the counts of each file to a baseline that only falls.

`make prose` writes the baseline, `tests/docs/prose.json`. Three things are counted in each file of hpo, trainer and
studies:

- openings: docstrings of modules, classes and functions whose first word is one of `OPENINGS`;
- phrases: matches of `PHRASES` in strings, docstrings among them. Each piece of an f-string is a string of its own;
- names: places that bind a name of `EMPTY_NAMES`, such as an assignment, a loop, a comprehension, `:=`, `with`,
  `except` or `case`. Parameters are left out, since they are part of a signature, and attributes too.

Without a baseline file `make prose` writes today's counts, which a change of these lists needs.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from places import ROOT

PACKAGES = ("hpo", "trainer", "studies")
BASELINE = Path("tests", "docs", "prose.json")

OPENINGS = re.compile(r"\s*(?:What|Whether|How|Of|Where|Why|As|Those)\b", re.IGNORECASE)
PHRASES = re.compile(
    r"\bis\s+no\s+(?!(?:longer|slower|faster|more|less|better|worse|earlier|later)\b)[a-z]+"
    r"|\b(?:leaves?|leaving|left)\s+away\b|\bbehind\s+it\b|\bmend(?:s|ed|ing)?\b|\bcomes?\s+to\b|\bof\s+those\s+that\b",
    re.IGNORECASE,
)
EMPTY_NAMES = frozenset({"found", "one", "given", "mine", "own", "held"})
KINDS = ("docstrings that open with a clause", "stock phrases", "names that say nothing")
SIMILAR = 0.5  # the share of a new file's lines that must stand in the file whose counts it takes over


class Fault(NamedTuple):
    """A place that counts: the index of its kind in `KINDS`, its line, and the words."""

    kind: int
    line: int
    words: str


class Counts(NamedTuple):
    """How many faults of each kind a file has, in the order of `KINDS`."""

    openings: int = 0
    phrases: int = 0
    names: int = 0

    def minus(self, other: Counts) -> Counts:
        return Counts(*(left - right for left, right in zip(self, other, strict=True)))


def faults(source: str) -> list[Fault]:
    """Returns the faults of a module's text, sorted by kind and line."""
    return sorted(_faults(source))


def _faults(source: str) -> Iterator[Fault]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                docstring = ast.get_docstring(node, clean=False)
                if docstring and OPENINGS.match(docstring):
                    yield Fault(0, node.body[0].lineno, docstring.split(maxsplit=1)[0])
            case ast.Constant(value=str(text)):
                yield from (Fault(1, node.lineno, match.group()) for match in PHRASES.finditer(text))
            case ast.Name(id=name, ctx=ast.Store()) if name in EMPTY_NAMES:
                yield Fault(2, node.lineno, name)
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                if name in EMPTY_NAMES:
                    yield Fault(2, node.lineno, name)
            case _:
                pass


def count(source: str) -> Counts:
    """Returns how many faults of each kind a module's text has."""
    kinds = Counter(fault.kind for fault in faults(source))
    return Counts(*(kinds[index] for index in range(len(KINDS))))


def count_all(root: Path) -> dict[str, Counts]:
    """Returns the counts of each file of the packages below `root`, by its path from there."""
    files = [file for package in PACKAGES for file in (root / package).rglob("*.py")]
    return {file.relative_to(root).as_posix(): count(file.read_text(encoding="utf-8")) for file in files}


def read_baseline(root: Path) -> dict[str, Counts]:
    """Returns the baseline's counts by file; files that are not in it have none."""
    lines = json.loads((root / BASELINE).read_text(encoding="utf-8"))
    return {path: Counts(*counts) for path, counts in lines.items()}


def write_baseline(root: Path, counts: Mapping[str, Counts]) -> None:
    """Writes the counts that are not zero, one file a line."""
    lines = [f"{json.dumps(path)}: {json.dumps(counts[path])}" for path in sorted(counts) if any(counts[path])]
    (root / BASELINE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def risen(root: Path, counts: Mapping[str, Counts], allowed: Mapping[str, Counts]) -> list[str]:
    """Returns a sentence for each count above the allowed one, with the lines to look at."""
    sentences: list[str] = []
    for path, counted in sorted(counts.items()):
        for kind, (number, limit) in enumerate(zip(counted, allowed.get(path, Counts()), strict=True)):
            if number > limit:
                source = (root / path).read_text(encoding="utf-8")
                places = [f"{line} ({words})" for index, line, words in faults(source) if index == kind]
                sentences.append(f"{path}: {number} {KINDS[kind]}, {limit} allowed, on lines {', '.join(places)}")
    return sentences


def update(root: Path) -> list[str]:
    """Lowers the baseline to today's counts, unless one of them has risen.

    A new file takes over counts by which the file that most of its lines come from has fallen: so a file that was
    renamed or split keeps its counts, and their sum does not rise.

    Returns the sentences on counts that have risen, in which case nothing is written.
    """
    counts = count_all(root)
    if not (root / BASELINE).exists():
        write_baseline(root, counts)
        return []
    allowed = read_baseline(root)
    new = [path for path in sorted(counts) if path not in allowed and any(counts[path])]
    allowed |= _taken_over(root, new, counts, allowed)
    sentences = risen(root, counts, allowed)
    if not sentences:
        write_baseline(root, counts)
    return sentences


def _taken_over(
    root: Path, new: list[str], counts: Mapping[str, Counts], allowed: Mapping[str, Counts]
) -> dict[str, Counts]:
    """Returns the counts of the new files that fit into what the files they come from no longer need."""
    if not new:
        return {}
    freed = {path: before.minus(counts.get(path, Counts())) for path, before in allowed.items()}
    earlier = _earlier_texts(root, [path for path, room in freed.items() if any(part > 0 for part in room)])
    taken: dict[str, Counts] = {}
    for path in new:
        origin = _origin((root / path).read_text(encoding="utf-8"), earlier)
        if origin is None:
            continue
        rest = freed[origin].minus(counts[path])
        if min(rest) >= 0:
            freed[origin], taken[path] = rest, counts[path]
    return taken


def _origin(text: str, earlier: Mapping[str, str]) -> str | None:
    """Returns the path of the earlier text that shares most lines with `text`, None where none shares half of them."""
    lines = _lines(text)
    shares = {path: (lines & _lines(other)).total() / max(lines.total(), 1) for path, other in earlier.items()}
    path = max(shares, key=shares.__getitem__, default=None)
    return path if path is not None and shares[path] >= SIMILAR else None


def _lines(text: str) -> Counter[str]:
    return Counter(line.strip() for line in text.splitlines() if line.strip())


def _earlier_texts(root: Path, paths: list[str]) -> dict[str, str]:
    """Returns the files' texts as of the commit that last wrote the baseline; git may not have them all."""
    commit = _git(root, "log", "-1", "--format=%H", "--", BASELINE.as_posix()).strip() or "HEAD"
    texts = {path: _git(root, "show", f"{commit}:./{path}") for path in paths}
    return {path: text for path, text in texts.items() if text}


def _git(root: Path, *arguments: str) -> str:
    """Returns what git prints, nothing where it fails or is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""


def main() -> None:
    sentences = update(ROOT)
    if sentences:
        sys.exit("\n".join([*sentences, "The baseline stays as it was: write these places in plain English."]))
    total = [sum(column) for column in zip(*read_baseline(ROOT).values(), strict=True)]
    print(", ".join(f"{number} {kind}" for number, kind in zip(total, KINDS, strict=True)))


if __name__ == "__main__":
    main()
