"""What the callbacks share: the sentence where a library is missing, and a study whose metric it does not report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from study_runs import drive

from hpo.errors import UserError
from hpo.integrations import trial as trials
from hpo.storage.home import Home

EXTRAS = {"lightning": "lightning", "huggingface": "llm", "keras": "keras", "xgboost": "xgboost"}
EXTRAS |= {"lightgbm": "lightgbm"}


@pytest.mark.parametrize("module", EXTRAS)
def test_without_the_library_a_sentence_names_the_extra(module, monkeypatch):
    package = "transformers" if module == "huggingface" else module
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # which Python takes for a package that is not there
    monkeypatch.delitem(sys.modules, f"hpo.integrations.{module}", raising=False)
    said = rf"hpo.integrations needs {package}: pip install 'hpo\[{EXTRAS[module]}\]'."
    with pytest.raises(UserError, match=said):
        __import__(f"hpo.integrations.{module}")


def test_what_a_library_itself_lacks_is_said_as_it_is():
    error = ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
    assert trials.lacking(error, "keras", "keras") is error


WRONG = """
import xgboost
import hpo
from hpo.integrations.xgboost import TrialCallback


@hpo.study(space={"eta": hpo.Float(0.1, 1.0)}, minimize="val/logloss")
def wrong(trial):
    data = xgboost.DMatrix([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
    xgboost.train({"eta": trial.params.eta}, data, 3, evals=[(data, "train")], callbacks=[TrialCallback(trial)])
"""


@pytest.mark.whole
def test_a_metric_that_is_not_reported_is_met_by_those_that_are(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    _, _, state, reason = drive(Home(tmp_path / "home"), trials=3, reference=str(file))
    assert state == "stopped"
    assert "no epoch has reported 'val/logloss', by which the study judges" in reason
    assert "Reported were train/rmse" in reason


class Bare:
    """All that a callback may know of a trial."""

    seed, epoch, step = 7, 0, 0

    def __init__(self, directory):
        self.directory, self.reports, self.files = directory, [], []

    def report(self, epoch=None, metrics=None, *, step=None):
        self.reports.append((epoch, metrics))
        return epoch == 2

    def save(self, files):
        self.files.append({path.name for path in Path(files).iterdir()})

    def resume(self):
        return None


def test_a_callback_needs_no_more_than_a_trials_methods(tmp_path):
    import xgboost

    from hpo.integrations.xgboost import TrialCallback

    trial, data = Bare(tmp_path), xgboost.DMatrix([[0.0], [1.0]], [0, 1])
    xgboost.train({}, data, 9, evals=[(data, "train")], callbacks=[TrialCallback(trial)], verbose_eval=False)
    assert [epoch for epoch, _ in trial.reports] == [1, 2] and trial.files == [{"model.ubj"}] * 2
    assert list(tmp_path.iterdir()) == [], "what was saved is the trial's, and lies in its directory no more"
