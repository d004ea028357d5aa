"""Files and classes stay small enough to be read at once: those that do not stand here with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

PACKAGES = ("hpo", "trainer", "studies")
LINES = 350  # of a file
METHODS = 25  # of a class
FILES = {
    "hpo/analysis/results/progress.py": "a study's state for those who look on, read in one transaction",
    "hpo/declaration/study.py": "one class, whose docstring says what each part of a declaration means",
    "hpo/ledger/queries.py": "each reading of the ledger that several parts share, beside the others",
    "hpo/ledger/transactions.py": "each change of a trial's state, beside those that it has to agree with",
    "hpo/space/dimensions.py": "Float, Int and Choice answer the same questions, each beside the others' answers",
    "trainer/loop.py": "one class, below, and the function that makes it",
}
CLASSES = {
    "hpo/analysis/results/progress.py:Progress": "what a picture of a study asks of it, most of them a line or two",
    "hpo/space/dimension.py:Dimension": "the questions that each kind of dimension answers",
    "hpo/space/space.py:Space": "questions about one frozen value, most of them a line or two",
    "hpo/tracking/mlflow/tracker.py:MlflowTracker": "the methods of a tracker, and hooks that a subclass fills by SQL",
    "hpo/tracking/run_folders.py:FolderTracker": "the methods of a tracker, and two that a subclass fills",
    "trainer/loop.py:Fit": "the steps of a training, which all change its one state",
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path


def methods(path: Path) -> Iterator[tuple[str, int]]:
    """Yields each class of a file with the number of its methods."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name, sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)


def test_no_file_is_longer_than_can_be_read_at_once():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules()}
    long = {name: count for name, count in lines.items() if count > LINES and name not in FILES}
    assert long == {}, f"divide it by meaning: {LINES} lines are enough for one subject"


def test_no_class_has_more_methods_than_can_be_kept_in_mind():
    counts = {f"{name}:{kind}": count for name, path in modules() for kind, count in methods(path)}
    large = {name: count for name, count in counts.items() if count > METHODS and name not in CLASSES}
    assert large == {}, f"give a part with data of its own a class of its own: {METHODS} methods are enough"


def test_each_exception_is_of_a_file_or_class_that_is_there():
    assert [name for name in (*FILES, *CLASSES) if not (ROOT / name.split(":")[0]).exists()] == []
    assert all(kind in dict(methods(ROOT / name)) for name, kind in (entry.split(":") for entry in CLASSES))
