"""The wrapper of the driver's container: where a restart does not help, Compose is to leave the container."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from compose_file import DOCKER

pytestmark = pytest.mark.usefixtures("process")

HPO = """#!{python}
import sys, time
print("begun", flush=True)
time.sleep(float(sys.argv[3]))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def begin(tmp_path: Path):
    """Starts the wrapper around a program that ends with the given code after so many seconds."""
    program = tmp_path / "hpo"
    program.write_text(HPO.format(python=sys.executable))
    program.chmod(0o755)

    def begin(verb: str, code: int, seconds: float = 0.0) -> subprocess.Popen[str]:
        words = [sys.executable, str(DOCKER / "start_driver.py"), str(program), verb, str(code), str(seconds)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


@pytest.mark.parametrize(
    ("verb", "code", "left"),
    [("run", 0, 0), ("run", 1, 1), ("run", 2, 0), ("run", 3, 0), ("resume", 5, 0), ("run", 75, 75), ("verify", 2, 2)],
)
def test_only_what_a_restart_does_not_help_ends_with_0(begin, verb, code, left):
    process = begin(verb, code)
    _, said = process.communicate(timeout=60)
    assert process.returncode == left
    assert (f"(exit code {code}): the container is not started again." in said) == (code != left)


def test_signals_go_to_the_program(begin):
    process = begin("run", 0, 60.0)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
