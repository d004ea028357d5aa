"""Finds the module in which a study is declared: a bundled one by name, a user's own by file."""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from hashlib import sha256
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from hpo.declaration.work_at_import import left, no_command_line, search_at_import
from hpo.errors import NO_TORCH, HpoError, StudyError, needs_torch
from hpo.text import near
from trainer.errors import is_stop
from trainer.files.paths import expanded
from trainer.runtime.quiet_imports import quiet_torchao

CARRIED = "HPO_CARRIED"  # "<directory of the declaration>:<its copy here>", if an executor has carried the code
_PACKAGE = "studies"  # by string: hpo never imports a study statically
_ENDINGS = (".py", ".yaml", ".yml")
_PLATFORM = ("hpo", "trainer")  # have their own versions and hashes
_REFERENCE = re.compile(r"(?P<where>.+?)(?::(?P<attribute>[A-Za-z_]\w*))?", re.DOTALL)


_importing: ContextVar[Path | None] = ContextVar("importing", default=None)  # the study's file that is being run now


def importing() -> Path | None:
    """Returns the study file whose import is in progress and has called this function."""
    return _importing.get()


def file_of(module: ModuleType | None) -> Path | None:
    """Returns the module's file; None for a notebook, and for standard input, whose file is `<stdin>`."""
    file = getattr(module, "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


def load_module(reference: str) -> tuple[ModuleType, str, str]:
    """Returns (module, attribute, the reference by which any process finds them again)."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise StudyError(f"study {reference!r}: give a name, such as {_shipped_example()}, or a Python file.")
    quiet_torchao()  # the study, or later its task, may import it
    where, attribute = match["where"], match["attribute"] or "STUDY"
    suffix = f":{attribute}" if match["attribute"] else ""
    if where.endswith(".py"):
        path = expanded(where).absolute()
        return _load_file(_carried(path)), attribute, f"{path}{suffix}"
    return _load_shipped(where), attribute, f"{where}{suffix}"


def is_another(before: str, now: str) -> bool:
    """Returns whether two references name different studies: the file of the first still exists, so it has not
    moved."""
    old, new = (_REFERENCE.fullmatch(reference) for reference in (before, now))
    if old is None or new is None or (old["where"], old["attribute"]) == (new["where"], new["attribute"]):
        return False
    if old["where"] == new["where"]:  # one file, whose only study a reference need not name
        return None not in (old["attribute"], new["attribute"])
    return old["where"] in shipped() or Path(old["where"]).is_file()


def _carried(path: Path) -> Path:
    """Returns the path of this process's copy of the code at `path`."""
    directory, _, copy = os.environ.get(CARRIED, "").partition(os.pathsep)
    return Path(copy) / path.relative_to(directory) if copy and path.is_relative_to(directory) else path


def shipped() -> list[str]:
    """Returns the names of the bundled studies; imports none of them."""
    names = (module.name for module in pkgutil.iter_modules(map(str, _shipped_places())))
    return sorted(name for name in names if not name.startswith("_"))  # those are shared by several studies


def _shipped_places() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _shipped_example() -> str:
    return repr(next(iter(shipped()), "name"))


def source_parts(file: Path, *modules: str) -> dict[str, Path]:
    """Returns the code that a declaration in `file` needs, files and packages, under labels that no move changes.

    It consists of the file itself, its package, if any, and everything that these and `modules` import, at any depth,
    from the directory beside it or from the bundled studies.
    """
    parts: dict[str, Path] = {}
    waiting = [("", file), *(part for name in modules for part in _part(file.parent, name))]
    if (file.parent / "__init__.py").is_file():
        waiting.append((".", file.parent))
    while waiting:
        label, path = waiting.pop()
        if label in parts:
            continue
        parts[label] = path
        sources = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        waiting += [part for source in sources for name in _imports(source) for part in _part(file.parent, name)]
    return parts


def code_of(parts: Iterable[str]) -> dict[str, Path]:
    """Returns label -> path of the code of a user's own samplers and strategies, named as `module:Class`.

    The code is each module and what it imports from its directory.
    """
    paths: dict[str, Path] = {}
    for module in (part.partition(":")[0] for part in parts):
        file = file_of(import_module(module))
        assert file is not None, module
        sources = source_parts(file)
        paths |= {module: sources.pop(""), **sources}
    return paths


def _imports(source: Path) -> Iterator[str]:
    """Yields the dotted names that a file may import; none if it is not Python, which cannot be imported itself."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(directory: Path, module: str) -> list[tuple[str, Path]]:
    """Returns label and path of what `module` imports: a shipped study, or a module beside the file; none for
    others."""
    top, _, rest = module.lstrip(".").partition(".")
    if top in _PLATFORM:
        return []
    roots, name, label = [directory], top, top
    if top == _PACKAGE and rest:
        roots, name = _shipped_places(), rest.partition(".")[0]
        label = f"{top}.{name}"
    candidates = [candidate for root in roots for candidate in (root / f"{name}.py", root / name) if name]
    return [(label, path) for path in candidates if path.is_file() or (path / "__init__.py").is_file()][:1]


def _files() -> list[str]:
    """Returns the files of the working directory that may be studies."""
    return sorted(file for file in os.listdir() if file.endswith(_ENDINGS))


def _load_shipped(name: str) -> ModuleType:
    if name not in (known := shipped()):
        if file := next((f"{name}{end}" for end in _ENDINGS if name and os.path.isfile(f"{name}{end}")), None):
            raise StudyError(f"unknown study {name!r}: the file {file} is meant by its whole name.")
        shown = f"there are {', '.join(known)}" if known else "none is installed"
        like = (
            near(name, known)
            or near(f"{name}.py", _files())
            or "; a file is meant by its whole name, FILE.py or FILE.yaml."
        )
        raise StudyError(f"unknown study {name!r}: {shown}{like}")
    module = f"{_PACKAGE}.{name}"
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    try:
        return import_module(module)
    except BaseException as error:
        if is_stop(error):
            raise
        raise _explained(error, Path(spec.origin)) from error


def _load_file(path: Path) -> ModuleType:
    """Imports a file under its own name; again only if its text has changed.

    The name is the same in every process, and the file's directory is importable, so that its siblings are. Raises
    StudyError if an imported sibling has the name of a library.
    """
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError if the path cannot be encoded
        missing = isinstance(error, FileNotFoundError)
        alike = near(path.name, (file.name for file in path.parent.glob("*.py"))) if missing else ""
        begun = ", or begin one with `hpo init`" if missing else ""
        fix = alike.removeprefix("; ") or f"name another{begun}."
        raise StudyError(f"study file {path} cannot be read: {getattr(error, 'strerror', error)}; {fix}") from error
    name = f"hpo_study_{sha256(str(path).encode()).hexdigest()[:12]}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    version = sha256(text).hexdigest()
    if getattr(loaded := sys.modules.get(name), "__hpo_version__", None) == version and loaded is not None:
        return loaded
    _check_siblings(path)
    if searches := search_at_import(text, str(path)):
        raise StudyError(searches)
    make_importable(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = _importing.set(path)
    try:
        with no_command_line():
            exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if is_stop(error):
            raise
        raise _explained(error, path) from error
    finally:
        _importing.reset(before)
    module.__dict__["__hpo_version__"] = version
    return module


def make_importable(directory: str) -> None:
    """Makes modules of `directory` importable after all others, so that a `queue.py` there does not shadow the
    library's."""
    if sys.path[:1] == [directory]:  # `python -m hpo` has put the current directory there
        sys.path.append(sys.path.pop(0))
    if directory not in sys.path:
        sys.path.append(directory)


def _check_siblings(file: Path) -> None:
    """Raises StudyError if an import by the study would not give the module beside the file."""
    siblings = [path for path in _modules(file.parent) if path != file]
    clashing = [path for path in siblings if _is_library(path.stem) or _imported_elsewhere(path)]
    if not clashing:
        return
    sources = [path for path in source_parts(file).values() if path.suffix == ".py"]
    imported = {name.partition(".")[0] for source in sources for name in _imports(source)}
    for module in clashing:
        if module.stem not in imported:
            continue
        if elsewhere := _imported_elsewhere(module):
            raise StudyError(
                f"{file} imports {module.stem}, which this process imported from {elsewhere}: rename {module}, or run "
                "the study in a process of its own."
            )
        raise StudyError(
            f"{module} has the name of a library, which is what `import {module.stem}` in the study finds: rename it."
        )


def _modules(directory: Path) -> list[Path]:
    """Returns the modules and packages of a directory."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    return [path for path in paths if path.suffix == ".py" or (path / "__init__.py").is_file()]


def _imported_elsewhere(module: Path) -> str:
    """Returns the file that this process imported under the module's name, if its text differs; else empty."""
    file = Path(getattr(sys.modules.get(module.stem), "__file__", None) or module)
    source = module if module.suffix == ".py" else module / "__init__.py"
    if _is_library(module.stem) or not file.is_file() or file.read_bytes() == source.read_bytes():
        return ""
    return str(file)


def _is_library(name: str) -> bool:
    """Returns whether Python, an installed package or this platform has a module with that name."""
    if name in sys.stdlib_module_names or name in (*_PLATFORM, _PACKAGE):
        return True
    installed = [sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")]
    return PathFinder.find_spec(name, installed) is not None


def _explained(error: BaseException, file: Path) -> HpoError:
    """Returns one sentence with the exception and its line in the study's code; the traceback stays on the cause."""
    if isinstance(error, SyntaxError):
        at = f"{error.filename}:{error.lineno}" if error.filename else file  # Python names no place for null bytes
        return StudyError(f"{at}: {type(error).__name__}: {error.msg}.")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == file.parent
    ]
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(file)
    if isinstance(error, HpoError):
        return type(error)(f"{line}: {error}")
    if needs_torch(error):
        return StudyError(f"{line} imports {NO_TORCH}.")
    if isinstance(error, SystemExit):
        return StudyError(left(error, line))
    text = " ".join(str(error).split()).rstrip(".")
    return StudyError(f"{line}: {type(error).__name__}{f': {text}' if text else ''}.")
