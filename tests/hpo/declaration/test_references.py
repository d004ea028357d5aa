"""A reference that leads to no study says what to write, and where."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hpo.declaration.references import load
from hpo.errors import StudyError

GUARDED = """
import hpo

if __name__ == "__main__":

    @hpo.study(space={"lr": hpo.Float(0.1, 0.9)}, minimize="loss")
    def train(trial):
        trial.report(1, {"loss": 1.0})
"""


@pytest.mark.parametrize(("reference", "attribute"), [("train.py", "STUDY"), ("train.py:train", "train")])
def test_a_study_below_the_guard_is_told_to_stand_above_it(tmp_path, monkeypatch, reference, attribute):
    """An import runs nothing below `if __name__`, so a worker would find no study there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(GUARDED)
    with pytest.raises(StudyError) as refused:
        load(reference)
    said = str(refused.value)
    assert said.startswith(
        f"{tmp_path / 'train.py'} has no {attribute}; write {attribute} = Study(...), or @hpo.study("
    )
    assert said.endswith("where an import of the file runs it: not below `if __name__`.")
    (tmp_path / "train.py").write_text(GUARDED.replace('if __name__ == "__main__":', "if True:"))
    load(reference)


DECLARED = """
import hpo
from pydantic import BaseModel, ConfigDict

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = 0.1

@hpo.study(space={"lr": hpo.Float(0.1, 0.9)}, minimize="loss")
def train(trial):
    trial.report(1, {"loss": 1.0})

STUDY = hpo.Study("own", Config(), "beside:Task", {"lr": hpo.Float(0.1, 0.9)}, [hpo.Objective("loss")])
"""
CALLING = """
import json, re_exports
from declared import train, STUDY
import hpo
from hpo.declaration.references import reference_of

@hpo.study(space={"lr": hpo.Float(0.1, 0.9)}, minimize="loss")
def own(trial):
    trial.report(1, {"loss": 1.0})

print(json.dumps([reference_of(one)[0] for one in (train, STUDY, own)]))
"""


def test_who_calls_with_a_study_of_another_file_is_not_its_code(tmp_path, process):
    """Neither the script that runs nor a module that hands the function on, whichever was imported first."""
    for name, code in {"declared": DECLARED, "re_exports": "from declared import train", "calling": CALLING}.items():
        (tmp_path / f"{name}.py").write_text(code)
    ran = subprocess.run([sys.executable, "calling.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    places = [tmp_path / "declared.py:train", tmp_path / "declared.py:STUDY", tmp_path / "calling.py:own"]
    assert json.loads(ran.stdout) == [*map(str, places)]
