"""Lanes are an extension: the ordinary path of a trial does not speak of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?i)\blanes?\b|_lane|lane_")
OWN = ("trainer/lanes/", "trainer/config/lanes.py", "hpo/workers/lane", "hpo/driver/lane_width.py")
# Files that name lanes and are not theirs: the field train.lanes and its readers, a task's lane_fields, the door in the
# worker, what commands show, and a model that refuses them. The number may fall and not rise.
MOST = 18


def test_few_files_beside_their_own_name_lanes():
    files = [path for part in ("hpo", "trainer", "studies") for path in (ROOT / part).rglob("*.py")]
    naming = [str(path.relative_to(ROOT)) for path in files if NAME.search(path.read_text())]
    others = sorted(name for name in naming if not name.startswith(OWN))
    assert len(others) <= MOST, others
