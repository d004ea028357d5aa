"""docs/releases.md says what hpo/declaration/behaviour.py says."""

from __future__ import annotations

import re
from collections.abc import Iterator

from places import ROOT

from hpo.declaration.behaviour import CHANGES, RELEASES

PAGE = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")


def test_its_table_has_each_release_and_each_raised_version():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| 0.")]
    assert {release: date for release, date, _ in rows} == RELEASES
    for release, _, text in rows:
        changes = [change for change in CHANGES if change.release == release]
        raised = {(change.part, change.version, change.what.removeprefix("it ")) for change in changes}
        assert {*_raised(text)} == raised, f"docs/releases.md: parts raised by {release}"


def _raised(text: str) -> Iterator[tuple[str, int, str]]:
    """Yields (part, version, what) of sentences such as "`sampler tpe`, `sampler gp`: version 2 rounds"."""
    for parts, version, what in re.findall(r"((?:`[^`]+`, )*`[^`]+`): version (\d+) (.+?)(?=\. `|$)", text):
        for part in re.findall(r"`([^`]+)`", parts):
            yield part, int(version), what
