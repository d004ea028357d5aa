"""docs/guide/at-hand.md and json.md: their shell blocks run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mirrored import Made
from places import ROOT

from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]


@pytest.mark.parametrize(("page", "said"), [("at-hand.md", "nothing would fail"), ("json.md", "1\n")])
def test_the_blocks_of_the_guide_run(page: str, said: str, tmp_path: Path):
    made = Made(Home.at(tmp_path / "home"), "mlp")
    made.complete(1, 1)
    made.ledger.close()
    command = tmp_path / "bin" / "hpo"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom hpo.__main__ import main\nmain()\n")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HPO_HOME": str(made.home.root)}
    env |= {"HPO_TRACKING_URI": made.home.tracking_uri}
    text = (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        line = ["bash", "-euo", "pipefail", "-c", block]
        ran = subprocess.run(line, capture_output=True, text=True, env=env, cwd=tmp_path)
        assert ran.returncode == 0 and ran.stdout.endswith((said, f"{said}.\n")), ran.stdout + ran.stderr
