"""Writes docs/map.md: every module of hpo and the trainer in at most twelve words, from its docstring."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"
# Path of a module -> a caption, where its first sentence is long and has no place at which it can be cut.
CAPTIONS: dict[str, str] = json.loads((ROOT / "docs" / "map_captions.json").read_text(encoding="utf-8"))
MOST_WORDS = 12
_HEAD = """# Map

Each module by the first sentence of its docstring, or its main clause. `python docs/make_map.py` writes this page.
Packages stand from the top floor down: a module imports from its own package and from those below it.
"""
# A comma before one of these words ends a clause that is a sentence by itself.
_ENDS = "which who whose where when while so since because until unless if and for as but in by with from to through"
_ENDS += " before without once each including except along over at kept such of or an after"
_CLAUSE = re.compile(rf",\s(?=(?:{'|'.join(_ENDS.split())})\s)")
# Top floor first, as the layers in pyproject.toml.
_HPO = (
    "cli",
    "display",
    "interchange",
    "analysis",
    "doctor",
    "ray_tune",
    "verify",
    "driver",
    "alerts",
    "workers",
    "tracking",
    "storage",
)
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
_TRAINER += ("losses", "runtime", "config", "files", "compat")


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
    rows = [f"| `{file.name}` | {_short(file)} |\n" for file in _modules(place)]
    return "".join(["| module | |\n|---|---|\n", *rows])


def _short(file: Path) -> str:
    """Returns a module's caption: of `CAPTIONS`, else its first sentence, shortened if it can be."""
    text = _caption(file).replace("\\|", "|")
    cut = CAPTIONS.get(file.relative_to(ROOT).as_posix()) or shortened(text) or text
    return cut.replace("|", "\\|")


def shortened(text: str) -> str | None:
    """Returns a sentence, or its main clause if it has more than `MOST_WORDS` words; None if that has more too."""
    if len(text.split()) <= MOST_WORDS:
        return text
    text = re.sub(r"\s*\((?:[^()]|\([^()]*\))*\)", "", text).rstrip(".")
    main = re.split(r"[:;]\s", text)[0]
    main = main if len(main.split()) > 2 else text  # a name and a colon
    if len(main.split()) <= MOST_WORDS:
        return f"{main}."
    heads = (main[: match.start()] for match in _CLAUSE.finditer(main))
    return next((f"{head}." for head in heads if _is_clause(head)), None)


def _is_clause(head: str) -> bool:
    return 2 < len(head.split()) <= MOST_WORDS and not head.count("`") % 2 and "," not in head


def _caption(file: Path) -> str:
    """Returns the first sentence of a module's docstring, as one line of a table."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text)[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
