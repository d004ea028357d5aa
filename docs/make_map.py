"""Writes docs/map.md: every module of hpo and the trainer with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"
_HEAD = """# Map

Each module with the first sentence of its docstring; `python docs/make_map.py` writes this page. Packages stand from
the top floor down: a module imports from its own package and from those below it.
"""
# Top floor first, as the layers in pyproject.toml.
_HPO = ("cli", "interchange", "analysis", "doctor", "verify", "driver", "alerts", "workers", "tracking", "storage")
_HPO += ("declaration", "ledger", "search", "space", "integrations")
_TRAINER = (
    "lanes",
    "diagnose",
    "memory",
    "distributed",
    "gradients",
    "optim",
    "metrics",
    "model",
    "checkpoint",
    "data",
)
_TRAINER += ("losses", "runtime", "config", "files")


def page() -> str:
    """Returns the page's text."""
    parts = [_HEAD]
    for root, packages in (("hpo", _HPO), ("trainer", _TRAINER)):
        parts.append(f"\n## {root}/\n\n{_caption(ROOT / root / '__init__.py')}\n\n{_table(ROOT / root)}")
        for package in packages:
            for place in _packages(ROOT / root / package):
                name = place.relative_to(ROOT).as_posix()
                parts.append(f"\n### {name}/\n\n{_caption(place / '__init__.py')}\n\n{_table(place)}")
    return "".join(parts)


def _packages(place: Path) -> list[Path]:
    inside = (file.parent for file in place.rglob("__init__.py") if "migrations" not in file.parts)
    return [one for one in sorted(inside) if _modules(one)]


def _modules(place: Path) -> list[Path]:
    return sorted(file for file in place.glob("*.py") if not file.name.startswith("__"))


def _table(place: Path) -> str:
    rows = [f"| `{file.name}` | {_caption(file)} |\n" for file in _modules(place)]
    return "".join(["| module | |\n|---|---|\n", *rows])


def _caption(file: Path) -> str:
    """Returns the first sentence of a module's docstring, as one line of a table."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text)[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
