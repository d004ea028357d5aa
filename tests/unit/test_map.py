"""docs/map.md is the tree as it is."""

from __future__ import annotations

import runpy

from hpo.study.code_digest import ROOT


def test_the_map_is_the_tree():
    made = runpy.run_path(str(ROOT / "docs" / "make_map.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "write it by `python docs/make_map.py`"


def test_every_package_and_module_has_a_caption():
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []
