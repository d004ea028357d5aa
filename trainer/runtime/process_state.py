"""Restores a process's state: settings of Python and of libraries, the directory, the environment, signals and so on.

    with kept() as process:
        ...  # a trial, which may change any of `ENTRIES`
    process.lasting  # the names of the changes that could not be undone

It imports no library: one that is not loaded has nothing to restore. Changes that a module makes during its import
stay, since no later import would make them again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trainer.runtime.process_entries import PYTHON, Entry, Modules
from trainer.runtime.process_libraries import LIBRARIES

ENTRIES = (*PYTHON, *LIBRARIES)
_UNREADABLE = object()
# A module that is half imported or of another version lacks the name, a working directory may be deleted, and some
# builds of torch refuse some reads. Such a value is left alone.
_UNREADABLE_NOW = (AttributeError, ImportError, OSError, RuntimeError)


class Snapshot:
    """The state of the process when the snapshot is made.

    With `light` it omits entries whose restoration discards compiled code.
    """

    def __init__(self, *, light: bool = False) -> None:
        self._entries = [entry for entry in ENTRIES if not (light and entry.compiled)]
        self._values = _read(self._entries)
        self._imported: dict[str, None] = {}

    @property
    def imported(self) -> Sequence[str]:
        """Returns the names of numeric entries that an import has changed since."""
        return [*self._imported]

    def restore(self) -> list[str]:
        """Restores the state; returns the names of the entries that stay changed."""
        changed = self._changed(self._entries)
        for entry in changed:
            if entry.write is not None:
                with suppress(Exception):  # a library's error; the entry then still reads as changed
                    entry.write(sys.modules[entry.module], self._values[entry.name])
        return [entry.name for entry in self._changed([entry for entry in changed if not entry.drawn])]

    def differing(self, other: Snapshot) -> list[str]:
        """Returns the names of the numeric entries whose values differ between the two snapshots."""
        both = [entry for entry in self._entries if entry.name in self._values and entry.name in other._values]
        return [entry.name for entry in both if entry.numeric and self._values[entry.name] != other._values[entry.name]]

    def _changed(self, entries: Sequence[Entry]) -> list[Entry]:
        now = _read(entries)
        known = [entry for entry in entries if entry.name in self._values]
        return [entry for entry in known if now.get(entry.name, _UNREADABLE) != self._values[entry.name]]

    def take_over(self, before: Snapshot, after: Snapshot) -> None:
        """Keeps the changes of an import between two snapshots."""
        for entry in self._entries:
            if entry.name not in after._values:
                continue
            old, new = before._values.get(entry.name), after._values[entry.name]
            if entry.name not in self._values:
                self._values[entry.name] = new
            elif old != new:
                self._values[entry.name] = _merged(self._values[entry.name], old, new)
                if entry.numeric:
                    self._imported[entry.name] = None


def _read(entries: Sequence[Entry]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in entries:
        if (module := sys.modules.get(entry.module)) is not None:
            with suppress(*_UNREADABLE_NOW):
                values[entry.name] = entry.read(module)
    return values


def _merged(kept: Any, old: Any, new: Any) -> Any:
    """Returns `kept`, changed as `old` was changed to `new`: key by key of a dict, entry by entry of a tuple."""
    if isinstance(kept, Modules):
        return kept.after_import(old, new)
    if isinstance(kept, dict) and isinstance(old, dict):
        merged = {key: value for key, value in kept.items() if key in new or key not in old}
        return merged | {key: value for key, value in new.items() if key not in old or old[key] != value}
    if isinstance(kept, tuple) and isinstance(old, tuple) and kept != old:
        added = tuple(entry for entry in new if entry not in old and entry not in kept)
        return added + kept if new[: len(added)] == added else kept + added
    return new


class Kept(Snapshot):
    """A snapshot that `kept` restores; `lasting` then has the names of the entries that stay changed."""

    lasting: Sequence[str] = ()


@contextmanager
def kept() -> Iterator[Kept]:
    """Restores the state of the process at the end of the block, however it ends."""
    before = Kept()
    try:
        with following(before):
            yield before
    finally:
        before.lasting = [*dict.fromkeys([*before.restore(), *before.imported])]


@contextmanager
def following(snapshot: Snapshot) -> Iterator[None]:
    """Adds to the snapshot, within the block, the changes that imports make."""
    _imports.follow(snapshot)
    try:
        yield
    finally:
        _imports.leave(snapshot)


class _Imports:
    """Watches imports: a finder of `sys.meta_path` that delegates to the others and watches the execution of modules.

    Only the outermost import is watched, whose changes include those of all that it imports.
    """

    def __init__(self) -> None:
        self._followers: list[Snapshot] = []
        self._thread = threading.local()

    def follow(self, snapshot: Snapshot) -> None:
        self._followers.append(snapshot)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def leave(self, snapshot: Snapshot) -> None:
        self._followers = [follower for follower in self._followers if follower is not snapshot]
        if not self._followers and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if getattr(self._thread, "executing", False):
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None and not isinstance(loader, type) and hasattr(loader, "exec_module"):
            with suppress(AttributeError):  # a loader that takes no attributes is not watched
                loader.exec_module = _Execution(self, loader)
        return spec

    def execute(self, loader: Any, module: ModuleType) -> None:
        if getattr(self._thread, "executing", False) or not self._followers:
            return loader.exec_module(module)
        self._thread.executing, before = True, Snapshot()
        try:
            loader.exec_module(module)
        finally:
            self._thread.executing, after = False, Snapshot()
            for snapshot in self._followers:
                snapshot.take_over(before, after)


class _Execution:
    """Replaces `exec_module` of a loader, once."""

    def __init__(self, imports: _Imports, loader: Any) -> None:
        self._imports, self._loader = imports, loader

    def __call__(self, module: ModuleType) -> None:
        vars(self._loader).pop("exec_module", None)
        self._imports.execute(self._loader, module)


_imports = _Imports()
