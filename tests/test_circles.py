"""No two modules of the product import each other, directly or through others, inside functions either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from places import ROOT

PACKAGES = ("hpo", "trainer", "studies")


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Yields the modules that are imported when the code runs; imports for annotations alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (part if part in modules else node.module for part in parts)
        else:
            yield from imported(node, modules)


def graph(files: dict[str, Path]) -> dict[str, set[str]]:
    modules = set(files)
    return {
        name: {other for other in imported(ast.parse(file.read_text()), modules) if other in modules and other != name}
        for name, file in files.items()
    }


def circle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    files = {module_name(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert circle(graph(files)) == []


def test_a_circle_inside_a_function_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("def late():\n    import b\n")
    (tmp_path / "b.py").write_text("from a import late\n")
    assert circle(graph({"a": tmp_path / "a.py", "b": tmp_path / "b.py"})) != []
