"""Computes digests of code that comments, docstrings and layout do not change.

The platform's own code counts by its definitions: the top-level statements of an area's files, in any order, without
imports of the platform's own names and paths of its modules. `definitions.json` records, for each area, the digest
whose behaviour the golden files have shown; an installation with another digest is modified. `make golden` writes it.
`python -m hpo.declaration.code_digest` stores the digests beside the bytecode, as does the first process that needs
them.

A user's own code counts by all of its statements, in their order, file by file, except those under `if __name__ ==
"__main__":`, which no worker runs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from hpo.declaration.bundled import BUNDLED, SHARED
from hpo.space.hashing import json_sha256, tree_sha256
from hpo.terminal import print

ROOT = Path(__file__).parents[2]  # contains hpo, the trainer and the studies
RECORD = Path(__file__).with_name("definitions.json")
FORM = "definitions:"  # prefix of what release 0.1.0 stored of the platform's code
STUDYS = "statements:"  # prefix for a study's own code; releases up to 0.1 stored sha256 of its files
_OWN = ("hpo", "trainer", "studies")
_PATH = re.compile(rf"(?:{'|'.join(_OWN)})(?:\.\w+)*[.:](\w+)")  # of a module, or of a name in one


def areas() -> dict[str, tuple[Path, ...]]:
    """Returns area -> paths of its code: the trainer, the search, and each bundled study."""
    studies = ROOT / "studies"
    shared = {name: [studies / package for package, users in SHARED.items() if name in users] for name in BUNDLED}
    return {
        "trainer": (ROOT / "trainer",),
        "search": (ROOT / "hpo" / "search", ROOT / "hpo" / "space"),
        **{f"study {name}": (studies / name, *shared[name]) for name in BUNDLED},
    }


def recorded() -> dict[str, str]:
    """Returns the digest of each area whose behaviour the golden files have shown."""
    return json.loads(RECORD.read_text(encoding="ascii"))


def record() -> None:
    """Records today's digest of each area."""
    digests = {area: definitions(*paths) for area, paths in areas().items()}
    RECORD.write_text(json.dumps(digests, indent=1) + "\n", encoding="ascii")


def modified() -> dict[str, str]:
    """Returns the digest of each area whose definitions are not the recorded ones."""
    known = recorded()
    digests = {area: definitions(*paths) for area, paths in areas().items()}
    return {area: digest for area, digest in digests.items() if digest != known.get(area)}


def definitions(*paths: Path) -> str:
    """Returns the digest of the Python files at these paths, each a file or a directory.

    Parsing takes a second for the whole trainer, so the result is stored in `__pycache__` under the hash of the files.
    """
    files = json_sha256([tree_sha256(path, "*.py") for path in (Path(__file__), *paths)])
    stored = Path(__file__).parent / "__pycache__" / f"digest-{files[:32]}.{sys.implementation.cache_tag}"
    try:
        return stored.read_text(encoding="ascii")
    except OSError:
        digest = json_sha256(sorted(_definitions(_sources(paths))))
    _keep(stored, digest)
    return digest


def of_study(path: Path, *, program: bool = False) -> str:
    """Returns the digests of a study's own code, a file or a package: of its statements and of its bytes.

    Studies of an earlier release are compared by the bytes. For a `program`, which is run and not imported, its code as
    a script counts too.
    """
    written = tree_sha256(path, "*.py")
    return f"{STUDYS}{_statements(path, written, program)}:{written}"


def of_text(text: str) -> str:
    """Returns the same digests for a function's text, such as one in a notebook."""
    source = textwrap.dedent(text)
    return f"{STUDYS}{_parsed(source.encode())}:{sha256(text.encode()).hexdigest()}"


def same(before: str, after: str) -> bool:
    """Returns whether two digests are of the same code: by its statements, or to the byte for a release up to 0.1."""
    if not after.startswith(STUDYS):
        return before == after
    _, statements, written = after.split(":")
    return before.split(":")[1] == statements if before.startswith(STUDYS) else before == written


@cache
def _statements(path: Path, written: str, program: bool) -> str:
    """Returns the digest of the statements in a file, or in each file of a package; `written` is the digest of the
    bytes."""
    if path.is_file() and path.suffix != ".py":
        return written
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return json_sha256({file.relative_to(path).as_posix(): _parsed(file.read_bytes(), program) for file in files})


def _parsed(source: bytes, program: bool = False) -> str:
    """Returns sha256 of the statements; of the bytes if they are not Python, since then no statement runs either."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return sha256(source).hexdigest()
    undocumented = _Undocumented() if program else _Imported()
    return sha256(_dumped(undocumented.visit(tree)).encode()).hexdigest()


def _dumped(tree: ast.AST) -> str:
    """Returns the tree as ast.dump of Python 3.11 writes it, so that a study goes on under a later Python.

    3.12 added a field for the parameters of generic functions and classes, 3.13 omits empty lists.
    """
    for node in ast.walk(tree):
        if getattr(node, "type_params", None) == []:
            del node.type_params  # pyright: ignore[reportAttributeAccessIssue]
    return ast.dump(tree) if sys.version_info < (3, 13) else ast.dump(tree, show_empty=True)


def _keep(path: Path, text: str) -> None:
    """Writes the file atomically if the current user installed the platform."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(text, encoding="ascii")
        part.replace(path)
    except OSError:
        with suppress(OSError):  # on a read-only file system even removing a missing file fails
            part.unlink()


def _sources(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _definitions(files: Iterable[Path]) -> set[str]:
    """Returns the sha256 of each top-level statement."""
    digests: set[str] = set()
    for file in files:
        tree = ast.parse(file.read_bytes())
        for statement in _Moveless(tree).visit(tree).body:
            digests.add(sha256(repr(_plain(statement)).encode()).hexdigest())
    return digests


def _plain(node: object) -> object:
    """Returns a syntax tree as tuples that are the same under every version of Python.

    Fields without a value, which a version may add, do not count.
    """
    if isinstance(node, list):
        return [_plain(child) for child in node]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return (type(node).__name__, *fields)


class _Undocumented(ast.NodeTransformer):
    """Removes docstrings from a module."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)


class _Imported(_Undocumented):
    """Keeps the part of a module that an import runs."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        is_script_block = ast.dump(node.test) == _AS_SCRIPT and not node.orelse
        return None if is_script_block else self.generic_visit(node)


_AS_SCRIPT = ast.dump(ast.parse('__name__ == "__main__"', mode="eval").body)


class _Moveless(_Undocumented):
    """Removes the parts of a module that change when it moves."""

    def __init__(self, tree: ast.Module) -> None:
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _own(node.module)]
        named = [(node.module, alias) for node in imports for alias in node.names]
        self._modules = {name.asname or name.name for module, name in named if _is_module(f"{module}.{name.name}")}

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None if all(_own(alias.name) for alias in node.names) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.AST]:
        dropped = node.module == "__future__" or _own(node.module)
        return [] if dropped else [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return ast.Name(node.attr, node.ctx)  # `module.name` as `name`: modules are renamed
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        path = _PATH.fullmatch(node.value) if isinstance(node.value, str) else None
        return ast.Constant(path[1]) if path else node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if typing else self.generic_visit(node)


def _own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _OWN


def _is_module(path: str) -> bool:
    module = ROOT.joinpath(*path.split("."))
    return module.is_dir() or module.with_suffix(".py").is_file()


if __name__ == "__main__":
    print(json.dumps(modified()) or "")
