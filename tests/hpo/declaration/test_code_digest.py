"""Digests of code: of the platform's a move of modules keeps it, of a study's own comments and layout do; what is
computed changes either."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.declaration import code_digest
from hpo.declaration.identity import drift
from hpo.space.hashing import tree_sha256

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
    return code_digest.definitions(root)


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
    assert code_digest.definitions(root) == before


def test_where_it_cannot_be_kept_it_is_computed_all_the_same(root, tmp_path, monkeypatch):
    """As on the read-only file system of a container, where nothing can be removed either."""
    before = written(root, BEFORE)
    (tmp_path / "__pycache__").write_text("no directory")
    monkeypatch.setattr(code_digest, "__file__", str(tmp_path / "module.py"))
    (tmp_path / "module.py").touch()
    assert code_digest.definitions(root) == before


OWN = '''"""A study."""
import hpo

RATE = 0.1
RATE = RATE * 2


@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss")
def train(trial):
    """Trains."""
    return RATE * trial.params.x  # the loss


if __name__ == "__main__":
    hpo.run(train, trials=3)
'''
SAME = {
    "a comment": ("  # the loss", "  # what is made small"),
    "a blank line": ("RATE = 0.1\n", "\nRATE = 0.1\n\n"),
    "layout": ('{"x": hpo.Float(0.0, 1.0)}', "{\n    'x': hpo.Float(0.0, 1.0),\n}"),
    "docstrings": ('"""Trains."""', '"""Trains a parabola."""'),
    "how often it is run": ("trials=3", "trials=30"),
}
OTHER = {
    "a number": ("RATE * trial", "2 * RATE * trial"),
    "the order of statements": ("RATE = 0.1\nRATE = RATE * 2\n", "RATE = RATE * 2\nRATE = 0.1\n"),
    "a statement repeated": ("RATE = RATE * 2\n", "RATE = RATE * 2\nRATE = RATE * 2\n"),
    "an import of the platform's": ("import hpo\n", "import hpo\nfrom trainer import losses\n"),
    "what an import runs": ('if __name__ == "__main__":', "if __name__:"),
}


def of_study(place: Path, text: str) -> str:
    place.write_text(text)
    return code_digest.of_study(place)


@pytest.mark.parametrize(("old", "new"), SAME.values(), ids=SAME)
def test_of_a_study_a_change_that_changes_nothing_is_none(tmp_path, old, new):
    assert OWN.count(old) == 1
    before, after = of_study(tmp_path / "own.py", OWN), of_study(tmp_path / "own.py", OWN.replace(old, new))
    assert before != after and code_digest.same(before, after)
    texts = code_digest.of_text(OWN), code_digest.of_text(OWN.replace(old, new))
    assert code_digest.same(*texts), "as a cell of a notebook"
    assert code_digest.same(of_study(tmp_path / "own.py", OWN), before), "whatever was in between"


@pytest.mark.parametrize(("old", "new"), OTHER.values(), ids=OTHER)
def test_of_a_study_every_statement_counts_in_its_order(tmp_path, old, new):
    assert OWN.count(old) == 1
    before, after = of_study(tmp_path / "own.py", OWN), of_study(tmp_path / "own.py", OWN.replace(old, new))
    assert not code_digest.same(before, after)


def test_a_studys_package_counts_file_by_file(tmp_path):
    package = tmp_path / "own"
    package.mkdir()
    (package / "a.py").write_text("RATE = 1\n")
    (package / "b.py").write_text("SIZE = 2\n")
    before = code_digest.of_study(package)
    (package / "a.py").write_text("RATE = 1  # of what\n")
    assert code_digest.same(before, code_digest.of_study(package))
    (package / "a.py").write_text("SIZE = 2\n")
    (package / "b.py").write_text("RATE = 1\n")
    assert not code_digest.same(before, code_digest.of_study(package)), "a name of another module is another one"


def test_what_is_not_python_counts_by_its_bytes(tmp_path):
    before, after = of_study(tmp_path / "a.py", "def (\n"), of_study(tmp_path / "a.py", "def (  # no\n")
    assert not code_digest.same(before, after) and code_digest.same(after, after)


def test_a_digest_of_an_earlier_release_is_the_studys_to_the_byte(tmp_path):
    file = tmp_path / "own.py"
    now = {"code": {"": of_study(file, OWN)}}
    begun = {"code": {"": tree_sha256(file, "*.py")}}
    assert drift(begun, now) == []
    [clause] = drift(begun, {"code": {"": of_study(file, OWN + "# more\n")}}, lambda: {"": file})
    assert clause == f"the code of {file} changed"


def test_of_a_study_it_is_the_same_under_every_python(tmp_path):
    """As Python 3.11 computes it: a study goes on under a later one, whose trees have other fields."""
    source = "class A:\n    xs = []\n\n    def f(self, *, y=None):\n        return f'{y!r:>{2}}'\n"
    (tmp_path / "study.py").write_text(source)
    statements = code_digest.of_study(tmp_path / "study.py").split(":")[1]
    assert statements == "7bbce6627c144d06775631c5cb5dcd1b858258fe50776b5895efafed9161bf0c"
