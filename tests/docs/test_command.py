"""docs/guide/command.md and foreign-scripts.md: their files are studies that run as they stand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pages import files
from places import ROOT
from study_runs import drive

from hpo.declaration.command.file import CommandFile
from hpo.declaration.command.placeholders import OWN_PLACEHOLDERS
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

GUIDE = ROOT / "docs" / "guide"
PAGE = GUIDE / "command.md"
FOREIGN = GUIDE / "foreign-scripts.md"
STUDIES = ("train.yaml", "count.yaml", "printed.yaml", "sweep.yaml")


@pytest.mark.parametrize("name", STUDIES)
def test_each_file_of_the_guide_is_a_study(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")  # of `python`
    for path, text in files(PAGE).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    _, status, state, reason = drive(Home(tmp_path / "home"), trials=2, reference=str(tmp_path / name))
    assert state == "complete", reason
    assert status.trials["complete"] >= 1


def test_every_key_and_place_is_on_the_page():
    page = (ROOT / "docs" / "reference" / "command-file.md").read_text()
    assert [key for key in CommandFile.model_fields if f"`{key}`" not in page] == []
    assert [place for place in OWN_PLACEHOLDERS if f"{{{place}}}" not in page] == []


def test_a_difference_has_at_most_three_lines():
    blocks = FOREIGN.read_text().split("```diff\n")[1:]
    assert len(blocks) == 3
    for block in blocks:
        lines = block.split("```")[0].splitlines()
        assert sum(line.startswith(("+", "-")) for line in lines[2:]) <= 3, lines


def test_the_files_of_foreign_scripts_are_read(tmp_path):
    assert {Path(name).name for name in files(FOREIGN)} >= {"mnist.yaml", "gpt.yaml", "sft.yaml"}
