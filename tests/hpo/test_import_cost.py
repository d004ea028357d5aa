"""What a command loads before it does anything: `hpo --help` and `hpo status` answer at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
from crafted import open_crafted, put_trial

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

HEAVY = {"torch", "mlflow", "optuna", "ray", "sklearn", "scipy", "pandas", "pyarrow", "alembic"}

LOADED = """
import json, sys
from hpo.cli.main import app
loaded = []
for command in json.loads(sys.argv[1]):
    try:
        app(command)
    except SystemExit as end:
        assert not end.code, end.code
    loaded.append(sorted({name.partition(".")[0] for name in sys.modules}))
print()
print(json.dumps(loaded))
"""


def modules_of(*commands: list[str]) -> list[set[str]]:
    """What one process has loaded after each of these commands."""
    line = [sys.executable, "-c", LOADED, json.dumps(commands)]
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    return [set(loaded) for loaded in json.loads(ran.stdout.splitlines()[-1])]


def cpu_seconds(*arguments: str) -> float:
    """Processor time of one interpreter, which does not grow with what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def over_its_libraries(libraries: str, *arguments: str) -> float:
    """What the command costs over an interpreter that only imports what it stands on; each the least of three."""
    pairs = [(cpu_seconds("-m", "hpo", *arguments), cpu_seconds("-c", f"import {libraries}")) for _ in range(3)]
    return min(command for command, _ in pairs) / min(floor for _, floor in pairs)


@pytest.fixture
def studied(home) -> list[str]:
    """The flags that name a home with a study of 50 trials."""
    home.create()
    ledger = open_crafted(home.root / "ledger.db")
    for number in range(50):
        put_trial(ledger, number, "complete", (0.1, 0.2))
    ledger.close()
    return ["--study", "crafted", "--home", str(home.root)]


@pytest.mark.parametrize("command", ["", "run", "status", "verify", "ui", "worker"])
def test_help_loads_nothing_heavy(command):
    [loaded] = modules_of([*command.split(), "--help"])
    assert not loaded & (HEAVY | {"sqlalchemy", "rich"})


def test_status_and_best_load_nothing_heavy(studied):
    commands = (["status"], ["status", "--json"], ["best"], ["show", "3"], ["compare"])
    after = modules_of(*([*command, *studied] for command in commands))
    assert "sqlalchemy" in after[0]
    assert not after[1] & {"rich"}
    assert not after[-1] & HEAVY


def test_a_driver_loads_neither_torch_nor_what_trackers_need(home):
    """Its workers and its mirror do, which import beside it."""
    flags = ("--trials", "1", "--workers", "1", "-o", "train.num_epochs=1", "--home", str(home.root))
    [loaded] = modules_of(["run", "--study", "mlp", *flags])
    assert "sqlalchemy" in loaded
    assert not loaded & {"torch", "mlflow", "sklearn", "pandas", "pyarrow", "alembic", "ray"}


def test_help_costs_little_more_than_the_library_of_its_options():
    assert over_its_libraries("typer", "--help") < 3


def test_status_costs_little_more_than_the_libraries_it_stands_on(studied):
    assert over_its_libraries("typer, sqlalchemy, pydantic", "status", "--json", *studied) < 2.5
