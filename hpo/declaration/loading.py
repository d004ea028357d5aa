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
from collections.abc import Iterator
from contextvars import ContextVar
from hashlib import sha256
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from hpo.declaration.at_import import left, no_command_line, search_at_import
from hpo.errors import NO_TORCH, HpoError, StudyError, needs_torch
from hpo.text import near
from trainer.errors import is_stop
from trainer.files.paths import expanded
from trainer.runtime.quiet import quiet_torchao

CARRIED = "HPO_CARRIED"  # "<directory of the declaration>:<its copy here>", where an executor has carried the code
_PACKAGE = "studies"  # by string: hpo never imports a study statically
_ENDINGS = (".py", ".yaml", ".yml")
_PLATFORM = ("hpo", "trainer")  # have versions and hashes of their own
_REFERENCE = re.compile(r"(?P<where>.+?)(?::(?P<attribute>[A-Za-z_]\w*))?", re.DOTALL)


_importing: ContextVar[Path | None] = ContextVar("importing", default=None)  # the study's file that is being run now


def importing() -> Path | None:
    """The study's file that is being imported at this moment, of which the caller is a part."""
    return _importing.get()


def file_of(module: ModuleType | None) -> Path | None:
    """The module's file; None for a notebook's, and for what comes from standard input, whose file is `<stdin>`."""
    file = getattr(module, "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


def load_module(reference: str) -> tuple[ModuleType, str, str]:
    """(module, attribute, the reference by which any process finds them again)."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise StudyError(f"study {reference!r}: give a name, such as {_shipped_example()}, or a Python file.")
    quiet_torchao()  # which the study may import, or its task later on
    where, attribute = match["where"], match["attribute"] or "STUDY"
    suffix = f":{attribute}" if match["attribute"] else ""
    if where.endswith(".py"):
        path = expanded(where).absolute()
        return _load_file(_carried(path)), attribute, f"{path}{suffix}"
    return _load_shipped(where), attribute, f"{where}{suffix}"


def is_another(before: str, now: str) -> bool:
    """Whether two references are of two studies, and not of one whose file has moved: the first is still there."""
    old, new = (_REFERENCE.fullmatch(reference) for reference in (before, now))
    if old is None or new is None or (old["where"], old["attribute"]) == (new["where"], new["attribute"]):
        return False
    if old["where"] == new["where"]:  # one file, of which a reference need not name its only study
        return None not in (old["attribute"], new["attribute"])
    return old["where"] in shipped() or Path(old["where"]).is_file()


def _carried(path: Path) -> Path:
    """Where the code of `path` is in this process."""
    directory, _, copy = os.environ.get(CARRIED, "").partition(os.pathsep)
    return Path(copy) / path.relative_to(directory) if copy and path.is_relative_to(directory) else path


def shipped() -> list[str]:
    """The names of the studies that come with the platform; none of them is imported."""
    names = (module.name for module in pkgutil.iter_modules(map(str, _shipped_places())))
    return sorted(name for name in names if not name.startswith("_"))  # what several of them share


def _shipped_places() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _shipped_example() -> str:
    return repr(next(iter(shipped()), "name"))


def source_parts(file: Path, *modules: str) -> dict[str, Path]:
    """The code a declaration in `file` stands on, files and packages, under labels that no move changes.

    That is the file itself, the package it lies in, if any, and what these and `modules` import, at any depth, from the
    directory beside it or from the studies that come with the platform.
    """
    found: dict[str, Path] = {}
    waiting = [("", file), *(part for name in modules for part in _part(file.parent, name))]
    if (file.parent / "__init__.py").is_file():
        waiting.append((".", file.parent))
    while waiting:
        label, path = waiting.pop()
        if label in found:
            continue
        found[label] = path
        sources = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        waiting += [part for source in sources for name in _imports(source) for part in _part(file.parent, name)]
    return found


def _imports(source: Path) -> Iterator[str]:
    """Dotted names that a file may import; none of one that is not Python, which cannot be imported itself."""
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
    """Label and place of what an import of `module` means: a shipped study, or what lies beside; none elsewhere."""
    top, _, rest = module.lstrip(".").partition(".")
    if top in _PLATFORM:
        return []
    roots, name, label = [directory], top, top
    if top == _PACKAGE and rest:
        roots, name = _shipped_places(), rest.partition(".")[0]
        label = f"{top}.{name}"
    places = [place for root in roots for place in (root / f"{name}.py", root / name) if name]
    return [(label, place) for place in places if place.is_file() or (place / "__init__.py").is_file()][:1]


def _files() -> list[str]:
    """What may be a study in the working directory."""
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
    """Import a file under a name of its own; again only if its text has changed.

    The name is the same in every process, and the file's directory is importable, so that its siblings are. Raises
    StudyError where one of those that are imported has the name of a library.
    """
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError where the path cannot be encoded
        raise StudyError(f"study file {path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    name = f"hpo_study_{sha256(str(path).encode()).hexdigest()[:12]}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    version = sha256(text).hexdigest()
    if getattr(loaded := sys.modules.get(name), "__hpo_version__", None) == version and loaded is not None:
        return loaded
    _check_siblings(path)
    if searches := search_at_import(text, str(path)):
        raise StudyError(searches)
    _make_importable(str(path.parent))
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


def _make_importable(directory: str) -> None:
    """Have modules of `directory` found after all others: a `queue.py` beside a study is not what libraries import."""
    if sys.path[:1] == [directory]:  # `python -m hpo` has put the current directory there
        sys.path.append(sys.path.pop(0))
    if directory not in sys.path:
        sys.path.append(directory)


def _check_siblings(file: Path) -> None:
    clashing = [place for place in _modules(file.parent) if place != file and _is_library(place.stem)]
    if not clashing:
        return
    sources = [path for path in source_parts(file).values() if path.suffix == ".py"]
    imported = {name.partition(".")[0] for source in sources for name in _imports(source)}
    for place in clashing:
        if place.stem in imported:
            raise StudyError(
                f"{place} has the name of a library, which is what `import {place.stem}` in the study finds: rename it."
            )


def _modules(directory: Path) -> list[Path]:
    """The modules and packages of a directory."""
    there = sorted(directory.iterdir()) if directory.is_dir() else []
    return [place for place in there if place.suffix == ".py" or (place / "__init__.py").is_file()]


def _is_library(name: str) -> bool:
    """Whether Python, what is installed, or this platform has a module of the name."""
    if name in sys.stdlib_module_names or name in (*_PLATFORM, _PACKAGE):
        return True
    installed = [sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")]
    return PathFinder.find_spec(name, installed) is not None


def _explained(error: BaseException, file: Path) -> HpoError:
    """One sentence: the place in the study's own code and the exception; the traceback stays on the cause."""
    if isinstance(error, SyntaxError):
        at = f"{error.filename}:{error.lineno}" if error.filename else file  # of null bytes Python names no place
        return StudyError(f"{at}: {type(error).__name__}: {error.msg}.")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == file.parent
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(file)
    if isinstance(error, HpoError):
        return type(error)(f"{place}: {error}")
    if needs_torch(error):
        return StudyError(f"{place} imports {NO_TORCH}.")
    if isinstance(error, SystemExit):
        return StudyError(left(error, place))
    text = " ".join(str(error).split()).rstrip(".")
    return StudyError(f"{place}: {type(error).__name__}{f': {text}' if text else ''}.")
