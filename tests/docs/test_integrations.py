"""docs/guide/integrations.md: each library's study, killed and resumed, ends as the one left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from places import ROOT

import hpo

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

PAGE = (ROOT / "docs" / "guide" / "integrations.md").read_text(encoding="utf-8")
STUDIES = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
NEEDS = {"Lightning": "lightning", "Hugging Face": "transformers", "Keras": "keras", "XGBoost": "xgboost"}
NEEDS |= {"LightGBM": "lightgbm"}


def test_the_page_has_a_study_for_each_library():
    assert STUDIES.keys() == NEEDS.keys()


@pytest.mark.parametrize("library", NEEDS)
def test_killed_and_resumed_a_study_is_the_one_left_alone(library, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS[library])
    monkeypatch.chdir(tmp_path)  # where a library might leave something
    (tmp_path / "page.py").write_text(STUDIES[library])
    command = [sys.executable, "-m", "hpo", "run", "--study", "page.py", "--trials", "2", "--executor", "inline"]
    ran = subprocess.run([*command, "--home", "whole"], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    kill = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@3"}
    killed = subprocess.run([*command, "--home", "killed"], env=kill, capture_output=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    resumed = [sys.executable, "-m", "hpo", "resume", "--executor", "inline", "--home", "killed"]
    again = subprocess.run(resumed, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    whole, resumed_study = hpo.open(home=tmp_path / "whole"), hpo.open(home=tmp_path / "killed")
    assert resumed_study.digest == whole.digest and whole.state == "complete"
    epochs = resumed_study.curves(0)
    assert [len(epochs)] and sorted(path.name for path in tmp_path.iterdir()) == ["killed", "page.py", "whole"]
