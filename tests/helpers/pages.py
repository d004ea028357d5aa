"""Lists the pages that people write, and the files in a page: blocks of code whose first line names one."""

from __future__ import annotations

import re
from pathlib import Path

from places import ROOT

# Not docs/map.md, which is of docstrings, nor docs/decisions, which stay as they were decided.
WRITTEN = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/guide/*.md", "docs/reference/*.md", "studies/*/*.md", "docker/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "map.md"
)
_BLOCK = re.compile(r"```(?:yaml|python|sh)\n# (?P<name>\S+)\n(?P<text>.*?)```", re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """Name -> text."""
    return {match["name"]: match["text"] for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))}


def differences(page: Path) -> list[str]:
    """The blocks that `patch` takes."""
    return re.findall(r"```diff\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
