"""Studies and their siblings that are named like libraries."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from rounds import rounds

from hpo.declaration.references import load
from hpo.errors import StudyError

BASE = """
import random
from hpo import Float, Objective, Study
from trainer.config import Frozen, TrainConfig

class Config(Frozen):
    lr: float = 0.1
    train: TrainConfig = TrainConfig()

def study(name):
    return Study(name, Config(), "m:T", {"lr": Float(0.1, 1.0)}, [Objective("val/loss")])
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A writer of files beside each other; sys.path is as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(**files: str) -> str:
        for old in tmp_path.glob("*.py"):
            old.unlink()
        for name, content in files.items():
            (tmp_path / f"{name}.py").write_text(content)
        return str(tmp_path / f"{next(iter(files))}.py")

    yield write
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@rounds("name", ["queue", "random", "typing", "trainer", "torch", "optuna", "hpo"])
def test_a_study_may_be_named_like_a_library(beside, name):
    file = beside(**{name: f"from base_of_{name} import study\nSTUDY = study('mine')", f"base_of_{name}": BASE})
    assert load(file).name == "mine"


@rounds("name", ["queue", "trainer", "random", "numpy", "studies"])
def test_a_sibling_with_a_librarys_name_is_told_of_where_it_is_imported(beside, name):
    file = beside(
        mine=f"from base_of_mine import study\nimport {name}\nSTUDY = study('m')", base_of_mine=BASE, **{name: "x = 1"}
    )
    with pytest.raises(StudyError, match=rf"/{name}\.py has the name of a library, which is what `import {name}`"):
        load(file)


def test_siblings_of_one_name_in_two_directories_are_never_mixed(tmp_path, monkeypatch):
    """Python imports a name once: the second study would get the first one's module, in silence."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for directory, name in (("a", "first"), ("b", "second"), ("c", "first")):
        (tmp_path / directory).mkdir()
        text = BASE.replace("study(name)", f"study(_={name!r}, name={name!r})")
        (tmp_path / directory / "shared_base.py").write_text(text)
        (tmp_path / directory / "mine.py").write_text("from shared_base import study\nSTUDY = study()\n")
    assert load(str(tmp_path / "a" / "mine.py")).name == "first"
    with pytest.raises(StudyError, match=r"b/mine\.py imports shared_base, .* imported from .*/a/shared_base\.py"):
        load(str(tmp_path / "b" / "mine.py"))
    assert load(str(tmp_path / "c" / "mine.py")).name == "first", "the same text is the same module"


@pytest.mark.usefixtures("process")
def test_what_libraries_import_late_is_never_the_users(beside, tmp_path):
    """A new process, in the study's directory, with a file for each module of Python's and of libraries."""
    taken = [*sys.stdlib_module_names, "numpy", "torch", "pandas", "scipy", "optuna", "mlflow", "sqlalchemy", "rich"]
    imported = {"random", "hpo", "trainer", "sys", "builtins", "encodings", "site", "__future__"}
    there = [name for name in taken if name not in imported and importlib.util.find_spec(name)]  # not those of Windows
    files = {name: f"raise SystemExit('the {name} of the user')" for name in there}
    beside(mine="from base_of_all import study\nSTUDY = study('m')", base_of_all=BASE, **files)
    code = "import sys; from hpo.declaration.references import load; load(sys.argv[1]); import torch, optuna, queue"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, "mine.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
