"""The densities that `like=` names: computed again from their data, and listed in the guide."""

from __future__ import annotations

import json
import re
import sys

import pytest
from places import ROOT

from bench import densities as script
from hpo.space.densities import densities

DATA = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(not (DATA / "taskset").exists(), reason="runs with the tables of learning curves in ../shared/data")
def test_the_file_is_what_the_script_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "TO", tmp_path / "densities.json")
    monkeypatch.setattr(sys, "argv", ["densities.py", str(DATA)])
    script.main()
    made, shipped = (
        json.loads(path.read_text())["densities"] for path in (script.TO, ROOT / "hpo/space/densities.json")
    )
    assert [row["name"] for row in made] == [row["name"] for row in shipped]
    for new, old in zip(made, shipped, strict=True):
        assert new["quantiles"] == pytest.approx(old["quantiles"], rel=1e-5)


def test_the_guide_lists_them():
    guide = (ROOT / "docs" / "guide" / "where-to-begin.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|$", guide, re.MULTILINE)
    assert [row[0] for row in rows] == [*densities()]
    for name, source, *values in rows:
        density = densities()[name]
        assert density.source.startswith(source)
        expected = [density.value(share) for share in (0.5, 0.1, 0.9)]
        assert [*map(float, values)] == pytest.approx(expected, rel=0.02)
