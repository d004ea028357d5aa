"""The parts of the page on extending work: searched with, resumed, held to the promises, and refused when changed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

import hpo
from hpo.cli.main import app
from hpo.testing import check_sampler, check_strategy, check_tracker

STUDY = """
import hpo

@hpo.study(space={"x": hpo.Float(-5.0, 5.0), "y": hpo.Float(-5.0, 5.0)}, minimize="loss", num_epochs=4)
def bowl(trial):
    x, y = trial.params["x"], trial.params["y"]
    for epoch in range(1, 5):
        if trial.report(epoch, {"loss": (x - 1) ** 2 + y**2 + 1 / epoch}):
            return
"""
CARELESS = """
import random
from my_parts import Csv, Near
from hpo.search.samplers.base import Proposal

class Careless(Near):
    def ask(self, number):
        return Proposal(self.space.from_unit([random.random() for _ in range(len(self.space))]), 0)

class Forgets(Csv):
    def read(self, folder):
        return []

    def append(self, folder, points):
        with open(folder / "metrics.csv", "a") as table:
            table.writelines(f"{p.key},{p.step},{p.timestamp},{p.value}\\n" for p in points)

class Twice(Forgets):
    read = Csv.read

    def append(self, folder, points):
        super().append(folder, [*points, *points])

class Remembers(Near):
    asked = 0
    def ask(self, number):
        self.asked += 1
        return super().ask(self.asked)
"""


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    """A directory with a study and the page's parts."""
    page = (ROOT / "docs/guide/extend.md").read_text()
    blocks = re.findall(r"```python\n(# my_parts\.py.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / "my_parts.py").write_text("\n".join(blocks))
    (tmp_path / "careless.py").write_text(CARELESS)
    (tmp_path / "study.py").write_text(STUDY)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_parts", "careless"):
        sys.modules.pop(name, None)


def search(beside: Path, trials: int, home: str, **given):
    return hpo.run(beside / "study.py", trials=trials, home=beside / home, progress=False, **given)


def values(study) -> list:
    return study.trials()[["number", "state", "params.x", "params.y", "metrics.loss"]].to_dict("records")


def test_a_study_by_them_resumes_to_what_it_would_have_been(process, beside):
    parts = {"sampler": "my_parts:Near", "strategy": {"name": "my_parts:Above", "most": 12.0}, "executor": "inline"}
    whole = search(beside, 9, "whole", **parts)
    search(beside, 4, "cut", **parts)
    assert values(search(beside, 9, "cut")) == values(whole)
    assert {*whole.trials()["state"]} == {"complete", "pruned"}


def test_an_executor_of_ones_own_trains(process, beside, capsys):
    study = search(beside, 2, "home", executor="my_parts:Verbose")
    assert "processes of this host train bowl" in capsys.readouterr().out
    assert [*study.trials()["state"]] == ["complete", "complete"]


def test_changed_code_of_a_part_is_refused(process, beside):
    search(beside, 3, "home", sampler="my_parts:Near", executor="inline")
    file = beside / "my_parts.py"
    file.write_text(file.read_text().replace("< 0.5}", "< 0.6}"))
    del sys.modules["my_parts"]
    with pytest.raises(hpo.HpoError, match="the code of my_parts changed"):
        search(beside, 5, "home")


def table(beside: Path, number: int) -> list[list[str]]:
    rows = [line.split(",") for line in (beside / f"tables/bowl/bowl-{number:04d}/metrics.csv").read_text().split()]
    return [row for row in rows if row[0] == "loss"]


def test_a_tracker_of_ones_own_shows_a_study_and_catches_up(process, beside, monkeypatch):
    """The mirror is a process that has never seen the test's sys.path: the file lies beside the study's."""
    monkeypatch.chdir(beside)
    study = search(beside, 2, "home", executor="inline", trackers=["my_parts:Csv:tables"])
    assert [row[1] for row in table(beside, 1)] == ["1", "2", "3", "4"]
    (beside / "my_parts.py").rename(beside / "kept.py")
    sys.modules.pop("my_parts")
    shutil.rmtree(beside / "__pycache__", ignore_errors=True)
    assert len(hpo.open("bowl", home=beside / "home").trials()) == 2, "reading needs no tracker"
    behind = CliRunner().invoke(app, ["sync", "--home", str(beside / "home")])
    assert "MLflow has everything" in behind.output and "module 'my_parts' does not exist" in behind.output
    with pytest.raises(hpo.HpoError, match="module 'my_parts' does not exist"):
        search(beside, 3, "home")
    (beside / "kept.py").rename(beside / "my_parts.py")
    (beside / "my_parts.py").write_text((beside / "my_parts.py").read_text() + "\n# a tracker may change\n")
    search(beside, 3, "home")
    assert len(table(beside, 2)) == 4 and len(study.trials()) == 3


def test_they_are_held_to_the_promises(beside):
    check_sampler("my_parts:Near")
    check_sampler({"name": "my_parts:Near", "every": 2})
    check_strategy("my_parts:Above")
    with pytest.raises(AssertionError, match="is proposed otherwise when the study is repeated"):
        check_sampler("careless:Careless")
    with pytest.raises(AssertionError, match="by a sampler that is rebuilt from the ledger"):
        check_sampler("careless:Remembers")
    check_tracker(f"my_parts:Csv:{beside / 'checked'}")
    for careless in ("Forgets", "Twice"):
        with pytest.raises(AssertionError, match="its points are not those sent, each of them once"):
            check_tracker(f"careless:{careless}:{beside / careless}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler": "my_parts:Nobody"}, "the sampler 'my_parts:Nobody': .*my_parts.py has no 'Nobody'"),
        ({"sampler": "nowhere:Near"}, "module 'nowhere' does not exist; put it beside the study's file"),
        ({"sampler": "my_parts:Above"}, "does not derive from hpo.search.samplers.base.BaseSampler"),
        ({"strategy": "my_parts:Near"}, "does not derive from hpo.search.strategies.base.BaseStrategy"),
        ({"executor": "my_parts:Near"}, "has no method start"),
        ({"trackers": ["my_parts:Csv"]}, "keeps its runs in a directory: give my_parts:Csv:DIR"),
        ({"trackers": ["my_parts:Near:x"]}, "the tracker 'my_parts:Near' has no method"),
        ({"trackers": ["nowhere:Csv:x"]}, "module 'nowhere' does not exist"),
        ({"sampler": {"name": "my_parts:Near", "evry": 2}}, "has no option 'evry'; it has every"),
        ({"strategy": {"name": "my_parts:Above", "most": "x"}}, "most='x' is refused"),
    ],
)
def test_what_is_no_part_is_refused_in_a_sentence(beside, given, said):
    with pytest.raises(hpo.HpoError, match=said):
        search(beside, 2, "home", **given)
