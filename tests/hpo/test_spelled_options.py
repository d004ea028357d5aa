"""Options are spelled by the door: no message outside the command line writes `--trials` or `-o` by itself."""

from __future__ import annotations

import ast
import re

from places import ROOT

OPTION = re.compile(r"(?<![\w/-])(--[a-z][a-z-]+|-o)(?![\w-])")
BY_A_DOOR = {"command", "step", "option", "add_argument"}  # functions that take options, or the words of a command
# File -> texts with an option, of argv, of other programs, of tables that only commands print. Only falls.
ALLOWED = {
    "hpo/alerts/process.py": 1,
    "hpo/analysis/report/publish.py": 1,
    "hpo/analysis/report/certainty.py": 1,
    "hpo/analysis/results/best.py": 2,
    "hpo/declaration/command/wandb_sweep.py": 2,
    "hpo/declaration/command/placeholders.py": 1,
    "hpo/declaration/environment.py": 2,
    "hpo/display/summary.py": 1,
    "hpo/doctor/devices.py": 1,
    "hpo/doctor/limits.py": 1,
    "hpo/doctor/packages.py": 7,
    "hpo/interchange/optuna_storage.py": 1,
    "hpo/ledger/backup.py": 1,
    "hpo/supervised.py": 2,
    "hpo/tracking/mirror_process.py": 1,
    "hpo/tracking/mlflow/artifacts.py": 1,
    "hpo/tracking/mlflow/registry.py": 2,
    "hpo/tracking/repair.py": 2,
    "hpo/tracking/ui/serve.py": 4,
    "hpo/workers/executors/pool.py": 3,
    "hpo/workers/nodes.py": 1,
}


def spelled(path: str) -> int:
    """Returns how many texts of a module spell an option; docstrings and the words of commands do not count."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    skipped = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_A_DOOR:
            skipped |= {id(part) for part in ast.walk(node)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return sum(bool(OPTION.search(str(text.value))) for text in texts if id(text) not in skipped)


def test_no_message_outside_the_command_line_spells_an_option():
    files = (file.relative_to(ROOT).as_posix() for file in (ROOT / "hpo").rglob("*.py"))
    counts = {file: spelled(file) for file in sorted(files) if not file.startswith(("hpo/cli/", "hpo/door.py"))}
    assert {file: count for file, count in counts.items() if count} == ALLOWED, "name it by hpo.door.option"
