"""Files that a task saves whole, in whatever format: they lie below `files/` of a checkpoint, and nothing is read of
them but their bytes. Torch-free."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from trainer.errors import CheckpointError, TrainerError
from trainer.files.durable import sync

FILES = "files"  # the directory below a checkpoint's
_LONGEST = 255  # bytes of a name, on common file systems

Source = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


def found(source: Source) -> dict[str, Path]:
    """Name below `FILES` -> file, of a directory (all that lies in it), one file, or a mapping of names to files.

    Links are followed, their targets copied. Raises TrainerError, since that is the task's mistake, for what is
    missing, no regular file, or badly named, and where there is nothing.
    """
    if isinstance(source, Mapping):
        files = {str(name): Path(path) for name, path in source.items()}
    elif (root := Path(source)).is_dir():
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if not path.is_dir()}
    else:
        files = {root.name: root}
    if not files:
        raise TrainerError(f"there is nothing to save in {source}: write the files first.")
    for name, path in files.items():
        if not is_name(name):
            raise TrainerError(_no_name(name))
        try:
            kind = path.stat().st_mode
        except OSError as error:
            raise TrainerError(f"{path} cannot be saved ({error.strerror}): write it first.") from error
        if not stat.S_ISREG(kind):
            what = "a directory: give the names of its files, or it alone" if stat.S_ISDIR(kind) else "no regular file"
            raise TrainerError(f"{path} cannot be saved: it is {what}.")
    return files


def is_name(name: str) -> bool:
    """Whether `name` is a relative path without `..`, in its plainest form."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and not name.startswith("/") and "\0" not in name
    return plain and ".." not in parts and all(len(part.encode()) <= _LONGEST for part in parts)


def check_name(name: str) -> None:
    """Raise CheckpointError unless `is_name`."""
    if not is_name(name):
        raise CheckpointError(_no_name(name))


def _no_name(name: str) -> str:
    return f"{name[:80]!r} cannot name a file of a checkpoint: give a relative path such as 'model.json'."


def copy(files: Mapping[str, Path], directory: Path) -> Iterable[str]:
    """Copy the files below `directory`, an existing one, and sync them and their directories; their names below
    `directory`. Raises OSError."""
    if not files:
        return []
    root = directory / FILES
    made = {root}
    for name, source in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        made.update(parent for parent in target.parents if parent.is_relative_to(root))
        shutil.copyfile(source, target)
        sync(target)
    for parent in sorted(made, reverse=True):
        sync(parent)
    return [f"{FILES}/{name}" for name in files]


def of_manifest(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files that were saved whole, by the names they were given."""
    return [name.removeprefix(f"{FILES}/") for name in names if name.startswith(f"{FILES}/")]


def stage(source: Path, target: Path) -> None:
    """Give a file a second name, under which it outlives the first; a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
