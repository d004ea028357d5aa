"""A reference that leads to no study says what to write, and where."""

from __future__ import annotations

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
