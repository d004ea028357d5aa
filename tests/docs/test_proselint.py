"""Pages pass proselint by the rules of .proselintrc.json.

It looks at code as well, so the rules on quotation marks and repeated words are off there.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import WRITTEN
from places import ROOT

pytestmark = [
    pytest.mark.usefixtures("process"),
    pytest.mark.skipif(find_spec("proselint") is None, reason="runs where make test has installed proselint"),
]


def lint(*pages: Path) -> str:
    command = [sys.executable, "-m", "proselint", "--config", str(ROOT / ".proselintrc.json"), "check"]
    return subprocess.run([*command, *map(str, pages)], capture_output=True, text=True, timeout=120).stdout


def test_pages_have_no_finding():
    assert lint(*WRITTEN) == ""


def test_a_stock_phrase_is_a_finding(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The driver waits at the end of the day, and it is very unique.\n")
    assert "page.md:1" in lint(page)
