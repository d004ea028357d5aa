"""Guides of the doors: their blocks run as they stand, and so do the examples of docstrings."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

import hpo

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("function.md"))))
def test_each_function_of_the_guide_is_a_study(number, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(blocks("function.md")[number])
    found = hpo.run(str(file), trials=2, executor="inline", home=tmp_path / "home", progress=False)
    assert found.state == "complete" and found.name == "train"


def test_the_block_of_the_guide_to_reports_writes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPO_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {}
    [block] = blocks("report.md")
    exec(block, names)
    assert names["page"] == Path("mlp.html")
    assert "<h1>mlp</h1>" in names["page"].read_text(encoding="utf-8")


def test_the_blocks_of_the_python_guide_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPO_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {}
    for block in blocks("python.md"):
        exec(block, names)
    assert names["found"].digest == names["study"].digest


def test_the_blocks_of_the_import_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPO_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {}
    for block in blocks("import-export.md"):
        exec(block, names)
    assert names["found"].best["params"] == {"lr": 0.1}


def test_the_block_of_the_alerts_guide_tells_and_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPO_HOME", str(tmp_path / "home"))
    [block] = blocks("alerts.md")
    exec(block, {})
    assert json.loads((tmp_path / "last-alert.json").read_text())["event"] == "end"
    assert len(list((tmp_path / "runs" / "mlp").glob("mlp-*/*tfevents*"))) == 2


def test_the_examples_of_docstrings_run(tmp_path, monkeypatch):
    """`run` makes the study that `resume` goes on with and `open` reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPO_HOME", str(tmp_path / "home"))
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    Path("trials.csv").write_text("run,lr,loss\na,0.1,0.5\n")
    for one in (hpo.study, hpo.run, hpo.resume, hpo.open, hpo.import_study):
        examples = finder.find(one, globs={})
        assert examples[0].examples, f"{one.__name__} has none"
        assert runner.run(examples[0]).failed == 0
    assert Path(tmp_path, "home", "ledger.db").exists()
