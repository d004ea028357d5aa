"""Counts prose of hpo, trainer and studies that is not plain English; `make prose` prints each place.

Three things count in each file:

- openings: docstrings of modules, classes and functions whose first word is one of `OPENINGS`;
- phrases: matches of `PHRASES` in strings, docstrings among them. Each piece of an f-string is a string of its own;
- names: places that bind a name of `EMPTY_NAMES`, such as an assignment, a loop, a comprehension, `:=`, `with`,
  `except` or `case`. Parameters are left out, since they are part of a signature, and attributes too. A field of a
  class may have a name of `EMPTY_LOCALS`: the sampler's `asked` and `told` trials are called so.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from places import ROOT

PACKAGES = ("hpo", "trainer", "studies")

OPENINGS = re.compile(r"\s*(?:What|Whether|How|Of|Where|Why|As|Those)\b", re.IGNORECASE)
PHRASES = re.compile(
    r"\bis\s+no\s+(?!(?:longer|slower|faster|more|less|better|worse|earlier|later)\b)[a-z]+"
    r"|\b(?:leaves?|leaving|left)\s+away\b|\bbehind\s+it\b|\bmend(?:s|ed|ing)?\b|\bcomes?\s+to\b|\bof\s+those\s+that\b",
    re.IGNORECASE,
)
EMPTY_NAMES = frozenset({"found", "one", "given", "mine", "own", "held"})
EMPTY_LOCALS = frozenset({"told", "asked", "said", "thing", "item"})
KINDS = ("docstring that opens with a clause", "stock phrase", "name that says nothing")


class Fault(NamedTuple):
    """A place that counts: the index of its kind in `KINDS`, its line, and the words."""

    kind: int
    line: int
    words: str


class Counts(NamedTuple):
    """The number of faults of each kind, in the order of `KINDS`."""

    openings: int = 0
    phrases: int = 0
    names: int = 0


def faults(source: str) -> list[Fault]:
    """Returns the faults of a module's text, sorted by kind and line."""
    return sorted(_faults(source))


def _faults(source: str) -> Iterator[Fault]:
    tree = ast.parse(source)
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                docstring = ast.get_docstring(node, clean=False)
                if docstring and OPENINGS.match(docstring):
                    yield Fault(0, node.body[0].lineno, docstring.split(maxsplit=1)[0])
            case ast.Constant(value=str(text)):
                yield from (Fault(1, node.lineno, match.group()) for match in PHRASES.finditer(text))
            case ast.Name(id=name, ctx=ast.Store()):
                if name in EMPTY_NAMES or (name in EMPTY_LOCALS and node not in fields):
                    yield Fault(2, node.lineno, name)
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                if name in EMPTY_NAMES | EMPTY_LOCALS:
                    yield Fault(2, node.lineno, name)
            case _:
                pass


def count(source: str) -> Counts:
    """Returns how many faults of each kind a module's text has."""
    kinds = Counter(fault.kind for fault in faults(source))
    return Counts(*(kinds[index] for index in range(len(KINDS))))


def places(root: Path) -> list[str]:
    """Returns a line for each fault of the packages below `root`: its file and line, its kind, and the words."""
    return [
        f"{file.relative_to(root).as_posix()}:{fault.line}: {KINDS[fault.kind]}: {fault.words}"
        for file in _files(root)
        for fault in faults(file.read_text(encoding="utf-8"))
    ]


def _files(root: Path) -> list[Path]:
    return sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))


if __name__ == "__main__":
    sys.exit("\n".join(places(ROOT)) or 0)
