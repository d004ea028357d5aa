"""docs/guide/integrations.md: each library's study, killed and resumed, ends as the one left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
from places import ROOT

import hpo

pytestmark = [
    pytest.mark.whole,
    pytest.mark.usefixtures("process"),
    pytest.mark.filterwarnings("ignore"),  # the libraries' advice
    pytest.mark.timeout(600),
]

PAGE = (ROOT / "docs" / "guide" / "integrations.md").read_text(encoding="utf-8")
STUDIES = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
NEEDS = {"Lightning": "lightning", "Hugging Face": "transformers", "Keras": "keras", "XGBoost": "xgboost"}
NEEDS |= {"LightGBM": "lightgbm"}


def test_the_page_has_a_study_for_each_library():
    assert STUDIES.keys() == NEEDS.keys()


@pytest.mark.parametrize("library", NEEDS)
def test_killed_and_resumed_a_study_is_the_one_left_alone(library, tmp_path, monkeypatch):
    if find_spec(NEEDS[library]) is None:
        pytest.skip(f"runs where make test has installed {NEEDS[library]}")
    monkeypatch.chdir(tmp_path)  # where a library might leave something
    (tmp_path / "page.py").write_text(STUDIES[library])
    command = [sys.executable, "-m", "hpo", "run", "--study", "page.py", "--trials", "2", "--executor", "inline"]
    kill = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@3"}
    killed = subprocess.run([*command, "--home", "killed"], env=kill, capture_output=True, timeout=250)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole = hpo.run("page.py", trials=2, executor="inline", home=tmp_path / "whole", progress=False)
    again = hpo.resume(home=tmp_path / "killed", progress=False)
    assert whole.state == again.state == "complete" and again.digest == whole.digest
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"killed", "page.py", "whole"}
