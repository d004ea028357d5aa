"""An installation whose code is not that of its release: it is named modified, until golden files show it harmless."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpo.declaration import code_digest, identity
from hpo.declaration.resolved import ResolvedStudy
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import DriftError
from hpo.storage.home import Home

# Edit -> (file, text, what takes its place), none of which changes a result.
EDITS = {
    "a reworded message of the search": ("hpo/search/samplers/cmaes.py", "takes one objective", "has one"),
    "a reworded message of the trainer": ("trainer/config/combinations.py", "leave one of them out.", "drop one."),
    "a renamed local": ("trainer/optim/lion.py", "", "def more(a):\n    b = a\n    return b\n"),
    "a reworded message of atft": ("studies/atft/panel.py", "", "MESSAGE = 'no stocks'\n"),
    "an added sampler": ("hpo/search/samplers/anew.py", "", "class Anew:\n    pass\n"),
    "a helper of the diagnosis": ("trainer/diagnose/pictures.py", "", "def helper():\n    return 1\n"),
}


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A copy of the code, which counts as the installation; what it records stands beside it."""
    for package in ("hpo/search", "hpo/space", "trainer", "studies"):
        shutil.copytree(code_digest.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_digest, "RECORD", Path(shutil.copy(code_digest.RECORD, tmp_path)))
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    monkeypatch.setattr(identity, "_modified", code_digest.modified)  # as another process would see it
    return tmp_path


def edited(tree: Path, file: str, old: str, new: str) -> None:
    """Replaces a text of the file, or adds one at its end."""
    path = tree / file
    text = path.read_text() if path.exists() else ""
    assert old in text, f"{file} has no {old!r}"
    path.write_text(text.replace(old, new) if old else f"{text}\n\n{new}")


def resolved(reference: str, home: Path) -> ResolvedStudy:
    return declare(request_of(Home(home), reference=reference), None, workers=1)


def test_the_code_is_the_one_whose_behaviour_was_shown():
    assert code_digest.modified() == {}, "run `make golden`: it records the code where no part behaves otherwise"


def test_a_moved_module_and_a_comment_modify_nothing(tree):
    edited(tree, "trainer/optim/sm3.py", "", "# More.\n")
    (tree / "hpo/search/ranks.py").write_text((tree / "hpo/search/pareto.py").read_text())
    (tree / "hpo/search/pareto.py").unlink()
    assert code_digest.modified() == {}


def test_harmless_edits_ask_until_their_behaviour_was_shown(tree, tmp_path):
    study = resolved("atft", tmp_path)
    begun = identity.identity(study)
    for file, old, new in EDITS.values():
        edited(tree, file, old, new)
    clauses = identity.drift(begun, identity.identity(study))
    assert [clause.partition(" is modified: `make golden`")[0] for clause in clauses] == [
        "the code of the search",
        "the code of study atft",
        "the code of the trainer",
    ]
    code_digest.record()  # as `make golden` does where all digests are equal
    assert identity.drift(begun, identity.identity(study)) == []


def test_an_edit_of_a_study_asks_that_study_alone(tree, tmp_path):
    studies = {name: resolved(name, tmp_path) for name in ("atft", "mlp")}
    begun = {name: identity.identity(study) for name, study in studies.items()}
    edited(tree, "studies/atft/task.py", "", "SCALE = 2\n")
    asked = {name: bool(identity.drift(begun[name], identity.identity(study))) for name, study in studies.items()}
    assert asked == {"atft": True, "mlp": False}


def test_a_study_that_began_with_modified_code_goes_on_with_it(tree, tmp_path):
    study = resolved("mlp", tmp_path)
    edited(tree, "trainer/step.py", "", "MORE = 1\n")
    begun = identity.identity(study)
    assert identity.drift(begun, identity.identity(study)) == []
    edited(tree, "trainer/step.py", "MORE = 1\n", "")
    [clause] = identity.drift(begun, identity.identity(study))
    assert clause == "the code of the trainer was modified when the study began, and is that of release 0.2.0 here"


def test_a_worker_with_modified_code_is_refused(tree, tmp_path):
    study = resolved("mlp", tmp_path)
    begun = identity.identity(study)
    identity.check_worker(study, begun, {"host": "a"})
    edited(tree, "trainer/step.py", "", "MORE = 1\n")
    with pytest.raises(DriftError, match="here the code of the trainer is modified"):
        identity.check_worker(study, begun, {"host": "a"})


def test_a_users_own_study_beside_the_bundled_ones_does_not_count(tree):
    (tree / "studies" / "mine").mkdir()
    (tree / "studies" / "mine" / "__init__.py").write_text("RATE = 1\n")
    assert code_digest.modified() == {}
