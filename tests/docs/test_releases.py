"""docs/releases.md says what hpo/declaration/behaviour.py says."""

from __future__ import annotations

from places import ROOT

from hpo.declaration.behaviour import CHANGES, RELEASES

PAGE = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")


def test_its_table_has_each_release_and_each_raised_version():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| 0.")]
    assert {release: date for release, date, _ in rows} == RELEASES
    for release, _, text in rows:
        raised = [change for change in CHANGES if change.release == release]
        parts = text.partition(": version")[0].replace("`", "").split(", ")
        assert not raised or parts == [change.part for change in raised], f"docs/releases.md: parts raised by {release}"
        assert all(f"version {change.version} {change.what.removeprefix('it ')}" in text for change in raised)
