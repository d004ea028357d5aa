"""Restores a process's state: settings of Python and of libraries, the directory, the environment, signals and so on.

    with kept() as process:
        ...  # a trial, which may change any of `ENTRIES`
    process.lasting  # the names of the changes that could not be undone

Nothing is imported for it: a library that is not loaded has nothing to restore. What a module sets while it is imported
stays, since no later import of it would set that again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trainer.runtime.process_entries import PYTHON, Entry
from trainer.runtime.process_libraries import LIBRARIES

ENTRIES = (*PYTHON, *LIBRARIES)
_UNREADABLE = object()


class Snapshot:
    """The state of the process at the time it is made; with `light`, of what costs no compiled code to restore."""

    def __init__(self, *, light: bool = False) -> None:
        self._entries = [entry for entry in ENTRIES if not (light and entry.compiled)]
        self._values = _read(self._entries)
        self._imported: dict[str, None] = {}

    @property
    def imported(self) -> Sequence[str]:
        """The names of entries by which numbers are computed and that an import has changed since."""
        return [*self._imported]

    def restore(self) -> list[str]:
        """Put the state back; returns the names of the entries that stay changed."""
        changed = self._changed(self._entries)
        for entry in changed:
            if entry.write is not None:
                with suppress(Exception):  # of a library, which then still reads as changed
                    entry.write(sys.modules[entry.module], self._values[entry.name])
        return [entry.name for entry in self._changed(changed)]

    def differing(self, other: Snapshot) -> list[str]:
        """The names of the entries by which numbers are computed and whose values differ between the two."""
        both = [entry for entry in self._entries if entry.name in self._values and entry.name in other._values]
        return [entry.name for entry in both if entry.numeric and self._values[entry.name] != other._values[entry.name]]

    def _changed(self, entries: Sequence[Entry]) -> list[Entry]:
        now = _read(entries)
        known = [entry for entry in entries if entry.name in self._values]
        return [entry for entry in known if now.get(entry.name, _UNREADABLE) != self._values[entry.name]]

    def take_over(self, before: Snapshot, after: Snapshot) -> None:
        """Keep what an import changed between two snapshots."""
        for entry in self._entries:
            if entry.name not in after._values:
                continue
            old, new = before._values.get(entry.name), after._values[entry.name]
            if entry.name not in self._values:
                self._values[entry.name] = new
            elif old != new and entry.write is not None:
                self._values[entry.name] = _merged(self._values[entry.name], old, new)
                if entry.numeric:
                    self._imported[entry.name] = None


def _read(entries: Sequence[Entry]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in entries:
        if (module := sys.modules.get(entry.module)) is not None:
            try:
                values[entry.name] = entry.read(module)
            except Exception:  # a value that cannot be read, such as a directory that is gone, is left alone
                continue
    return values


def _merged(kept: Any, old: Any, new: Any) -> Any:
    """The value `kept`, changed as `old` was changed to `new`: key by key of a dict, item by item of a tuple."""
    if isinstance(kept, dict) and isinstance(old, dict):
        merged = {key: value for key, value in kept.items() if key in new or key not in old}
        return merged | {key: value for key, value in new.items() if key not in old or old[key] != value}
    if isinstance(kept, tuple) and isinstance(old, tuple) and kept != old:
        added = tuple(item for item in new if item not in old and item not in kept)
        return added + kept if new[: len(added)] == added else kept + added
    return new


class Kept(Snapshot):
    """A snapshot that `kept` restores; `lasting` then has the names of what stays changed."""

    lasting: Sequence[str] = ()


@contextmanager
def kept() -> Iterator[Kept]:
    """Restore the state of the process at the end of the block, whatever ends it."""
    before = Kept()
    try:
        with following(before):
            yield before
    finally:
        before.lasting = [*dict.fromkeys([*before.restore(), *before.imported])]


@contextmanager
def following(snapshot: Snapshot) -> Iterator[None]:
    """Add to the snapshot, within the block, what imports of modules change."""
    _imports.follow(snapshot)
    try:
        yield
    finally:
        _imports.leave(snapshot)


class _Imports:
    """Watches imports: a finder of `sys.meta_path` that finds what the others do and looks on while that is executed.

    Only the outermost import is looked at, whose changes are those of all that it imports.
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
            with suppress(AttributeError):  # a loader that takes no attributes is not looked at
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
    """Stands for `exec_module` of a loader, once."""

    def __init__(self, imports: _Imports, loader: Any) -> None:
        self._imports, self._loader = imports, loader

    def __call__(self, module: ModuleType) -> None:
        vars(self._loader).pop("exec_module", None)
        self._imports.execute(self._loader, module)


_imports = _Imports()
