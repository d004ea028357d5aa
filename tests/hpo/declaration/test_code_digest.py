"""The digest of the platform's code: a move of modules keeps it, a change of what they define does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.declaration import code_digest
from hpo.declaration.identity import drift

READS = '''"""Reads."""
import math

LIMIT = 3


def first(rows):
    """The first."""
    return rows[0]
'''
BEST = """
import math
from trainer import reads
from trainer.reads import LIMIT

KINDS = {"a": "trainer.best:best"}


def best(rows):
    # of all
    return math.floor(reads.first(rows)) if len(rows) > LIMIT else None
"""
BEFORE = {"reads.py": READS, "best.py": BEST}
# The same definitions: one module renamed and moved, one definition split off, another layout, other comments.
FOUND = """
from __future__ import annotations

import math

from trainer.queries import first as queries
from trainer.queries.limit import LIMIT

KINDS = {
    "a": "trainer.best.found:best",
}


def best(rows):
    return math.floor(
        queries.first(rows)
    ) if len(rows) > LIMIT else None
"""
AFTER = {
    "queries/first.py": "def first(rows):\n    return rows[0]\n",
    "queries/limit.py": "LIMIT = 3  # rows\n",
    "best/found.py": FOUND,
}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    return tmp_path / "trainer"


def written(root: Path, files: dict[str, str]) -> str:
    """The digest of the package as it then is."""
    for file in root.rglob("*.py"):
        file.unlink()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return code_digest.digest(root)


def test_moves_renames_of_modules_layout_and_comments_keep_it(root):
    assert written(root, BEFORE) == written(root, AFTER)


@pytest.mark.parametrize(
    ("old", "new"),
    [("LIMIT = 3", "LIMIT = 4"), ("rows[0]", "rows[-1]"), ("math.floor", "math.ceil"), ("len(rows) >", "len(rows) >=")],
)
def test_a_change_of_what_is_computed_changes_it(root, old, new):
    before = written(root, BEFORE)
    assert written(root, {name: text.replace(old, new) for name, text in BEFORE.items()}) != before


def test_it_is_kept_and_found_again_by_the_files_content(root, monkeypatch):
    before = written(root, BEFORE)
    monkeypatch.setattr(code_digest, "_definitions", lambda files: pytest.fail("parsed again"))
    assert code_digest.digest(root) == before


def test_a_hash_of_files_and_places_says_that_modules_were_moved():
    old = {"trainer": "0" * 64, "search": "1" * 64, "code": {"": "2" * 64}}
    new = {"trainer": code_digest.FORM + "0", "search": code_digest.FORM + "1", "code": {"": code_digest.FORM + "2"}}
    [clause] = drift(old, new)
    assert "modules were moved since the study began" in clause


def test_where_it_cannot_be_kept_it_is_computed_all_the_same(root, tmp_path, monkeypatch):
    """As on the read-only file system of a container, where nothing can be removed either."""
    before = written(root, BEFORE)
    (tmp_path / "__pycache__").write_text("no directory")
    monkeypatch.setattr(code_digest, "__file__", str(tmp_path / "module.py"))
    (tmp_path / "module.py").touch()
    assert code_digest.digest(root) == before
