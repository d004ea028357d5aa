"""Loading a declaration: what libraries say on the way."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hpo.cli.main import app


def test_libraries_that_a_study_imports_say_nothing_of_no_use(process, tmp_path):
    """torchao tells of kernels for other machines, and torch of how torchao registers its Enums; an error is heard."""
    (tmp_path / "noisy.py").write_text(
        "import logging, torchao.float8\nlogging.getLogger('torchao').error('of use')\nSTUDY = 1\n"
    )
    program = "from hpo.declaration.loading import load_module; load_module('noisy.py')"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "of use\n")


@pytest.mark.whole
def test_a_run_reads_a_study_that_imports_something_slow_once(process, tmp_path, monkeypatch):
    """`imported_once.py` records its imports; no other test may leave a module of its name in this process."""
    (tmp_path / "imported_once.py").write_text("with open('imports', 'a') as file:\n    file.write('x')\n")
    (tmp_path / "train.py").write_text(
        "import hpo, imported_once\n"
        "@hpo.study(space={'x': hpo.Float(0, 1)}, minimize='loss')\n"
        "def train(trial):\n"
        "    trial.report(1, {'loss': trial.params.x})\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["run", "--study", "train.py", "--trials", "2", "--executor", "inline", "--home", "home"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (tmp_path / "imports").read_text() == "x"
