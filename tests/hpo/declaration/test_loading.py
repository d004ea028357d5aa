"""Loading a declaration: what libraries say on the way."""

from __future__ import annotations

import subprocess
import sys


def test_libraries_that_a_study_imports_say_nothing_of_no_use(process, tmp_path):
    """torchao tells of kernels for other machines, and torch of how torchao registers its Enums; an error is heard."""
    (tmp_path / "noisy.py").write_text(
        "import logging, torchao.float8\nlogging.getLogger('torchao').error('of use')\nSTUDY = 1\n"
    )
    program = "from hpo.declaration.loading import load_module; load_module('noisy.py')"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "of use\n")
