"""The bench of report and live page ends, and measures all that it names."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from places import ROOT


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="runs after `apt-get install chromium`")
def test_a_small_study_is_measured_in_a_file_and_live(process):
    pytest.importorskip("playwright", reason="runs where make test has installed playwright")
    ran = subprocess.run(
        [sys.executable, "bench/report.py", "--trials", "10"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    machine, head, file, live = ran.stdout.splitlines()
    measured = [float(cell) for cell in live.split()[2:]]
    assert file.split()[:2] == ["10", "file"] and live.split()[:2] == ["10", "live"]
    assert len(measured) == 10 and min(measured) >= 0 and measured[1] < 5000, head
    assert all(0 < float(cell) < 60_000 for cell in file.split()[2:]), machine
