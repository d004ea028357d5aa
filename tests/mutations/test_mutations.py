"""The planted defects still fit the tree, and the tests that catch them are still in the default run."""

from __future__ import annotations

import ast
import shutil

import pytest
from planted import DEFECTS, ROOT

# The parts of the product that have defects, by the beginnings of their names.
PARTS = ("ledger", "driver", "search", "checkpoint", "loop", "mirror", "behaviour")


def slow(node: ast.AST) -> bool:
    """Whether a decorator, or the marks of a module, leave a test out of the default run."""
    return any(isinstance(part, ast.Attribute) and part.attr == "slow" for part in ast.walk(node))


def test_every_part_has_its_defects():
    parts = [name.split("-")[1] for name in DEFECTS]
    assert set(parts) == set(PARTS) and len(parts) >= 20
    assert all(parts.count(part) >= 3 for part in PARTS)


@pytest.mark.skipif(shutil.which("git") is None, reason="runs where git is installed")
def test_every_patch_applies():
    results = {name: defect.apply(ROOT, "--check") for name, defect in DEFECTS.items()}
    assert {name: result.stderr for name, result in results.items() if result.returncode} == {}


def test_every_test_that_catches_a_defect_is_in_the_default_run():
    for name, defect in DEFECTS.items():
        assert defect.sentence.endswith(".") and defect.caught_by, name
        for test in defect.caught_by:
            file, _, function = test.partition("::")
            body = ast.parse((ROOT / file).read_text()).body
            found = [
                node for node in body if isinstance(node, ast.FunctionDef) and node.name == function.partition("[")[0]
            ]
            assert found, f"{name}: there is no {test}"
            whole = [one for one in found[0].decorator_list if not isinstance(one, ast.Call)]
            marks = [node for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
            assert not any(map(slow, [*whole, *marks])), f"{name}: {test} is slow"
