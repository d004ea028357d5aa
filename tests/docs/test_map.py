"""Pages about the code are true: the map of the tree, and the tests that decisions name."""

from __future__ import annotations

import re
import runpy

from hpo.declaration.code_digest import ROOT


def test_the_map_is_the_tree():
    made = runpy.run_path(str(ROOT / "docs" / "make_map.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "write it by `python docs/make_map.py`"


def test_every_package_and_module_has_a_caption():
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []
    rooms = [place.parent for root in ("hpo", "trainer") for place in (ROOT / root).rglob("__init__.py")]
    names = {room.relative_to(ROOT).as_posix() for room in rooms} - {"hpo/ledger/migrations"}
    assert {name for name in names if f"# {name}/" not in page} == set()


def test_almost_every_module_has_at_most_twelve_words():
    rows = re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", (ROOT / "docs" / "map.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 500
    longer = [(name, text) for name, text in rows if len(text.split()) > 12]
    assert len(longer) <= 20, f"write their captions in docs/map_captions.json: {longer}"


def test_a_long_sentence_is_cut_after_its_main_clause():
    shortened = runpy.run_path(str(ROOT / "docs" / "make_map.py"))["shortened"]
    assert shortened("Plans a run.") == "Plans a run."
    assert shortened("Plans a run (Li 2020): first what a user has asked for, then the rest of it.") == "Plans a run."
    assert shortened("Plans a run, since nobody else can tell what is to be done here by then.") == "Plans a run."
    assert shortened("Plans runs of studies that no other process on any of the hosts drives now.") is None


def test_every_test_that_a_decision_names_is_there():
    missing = [
        f"{page.name}: {file}::{name}"
        for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))
        for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
